"""Packages that settings need beside Megatron-Core. Standard library only: planning reads it too.

get: (section, field, default) -> the field's value, or the default if the section or field is missing.
has: (module) -> whether it can be imported where the training runs.
"""

from collections.abc import Callable, Iterator
from typing import Any

Get = Callable[[str, str, Any], Any]
Has = Callable[[str], bool]

NVRX, MODELOPT, EMERGING = "nvidia_resiliency_ext", "modelopt", "emerging_optimizers"
OF_EMERGING = ("muon", "dist_muon", "lion", "soap")
_OWN_OPTIMIZERS = ("adam", "sgd")
# Switch -> the module, and the project that installs it
_SWITCHES = {
    "ft.enable_ft_package": (NVRX, "nvidia-resiliency-ext"),
    "nvrx_straggler.enabled": (NVRX, "nvidia-resiliency-ext"),
    "inprocess_restart.enabled": (NVRX, "nvidia-resiliency-ext"),
    "logger.log_energy": ("pynvml", "nvidia-ml-py"),
    "model.restore_modelopt_state": (MODELOPT, "'cloudai-mbridge[modelopt]'"),
    "tensor_inspect.enabled": ("nvdlfw_inspect", "nvdlfw-inspect"),
}
# Kind of layer, by its letter in a pattern or the variant's name -> its imports and the extra that installs them
_MAMBA = (("mamba_ssm", "causal_conv1d"), "mamba")
_LINEAR = (("fla",), "linear-attention")
_SPARSE = (("fast_hadamard_transform",), "sparse-attention")
_KERNELS = {"M": _MAMBA, "G": _LINEAR, "gated_delta_net": _LINEAR, "D": _SPARSE, "dsa": _SPARSE}
_WORDS = {"M": "Mamba layers", "G": "Gated DeltaNet", "D": "sparse attention"}
_EXCHANGE, _EXCHANGES = "deep_ep", ("deepep", "hybridep")
MODULES = (
    *dict.fromkeys(module for module, _ in _SWITCHES.values()),
    *dict.fromkeys(module for modules, _ in _KERNELS.values() for module in modules),
    *(_EXCHANGE, EMERGING),
)


def for_switches(get: Get, has: Has) -> Iterator[str]:
    """Yield a message for every feature whose package is missing."""
    for key, (module, project) in _SWITCHES.items():
        section, _, switch = key.partition(".")
        if get(section, switch, False) and not has(module):
            yield (
                f"{key}=true needs the Python package {project}, which is not installed: "
                f"run `pip install {project}` in the job's environment, or set {key}=false"
            )


def for_optimizer(get: Get, has: Has) -> Iterator[str]:
    """Yield a message if the optimizer's package is missing."""
    name = get("optimizer", "optimizer", "adam")
    if name not in _OWN_OPTIMIZERS and not has(EMERGING):
        yield (
            f"optimizer.optimizer = {name!r} needs the Python package emerging-optimizers, which is not installed: run"
            " `pip install 'cloudai-mbridge[emerging]'` in the job's environment, or use 'adam'"
        )


def for_exchange(get: Get, has: Has) -> Iterator[str]:
    """Yield a message if the package of the experts' exchange is missing."""
    backend = get("model", "moe_flex_dispatcher_backend", None)
    is_used = get("model", "num_moe_experts", None) and get("model", "moe_token_dispatcher_type", None) == "flex"
    if is_used and backend in _EXCHANGES and not has(_EXCHANGE):
        yield (
            f"model.moe_flex_dispatcher_backend = {backend!r} needs the package deep_ep, which is not installed;"
            ' install it, or set model.moe_token_dispatcher_type = "alltoall" (cmd_args.moe_flex_dispatcher_backend'
            ' = "None")'
        )


def for_layers(get: Get, has: Has, pattern: str) -> Iterator[str]:
    """Yield a message for every kind of layer whose kernels are missing. pattern: of a hybrid model, "" for others."""
    variant = get("model", "experimental_attention_variant", None)
    for kind in dict.fromkeys([*([] if variant is None else [variant]), *pattern]):
        modules, extra = _KERNELS.get(kind, ((), ""))
        # it is for the rotation alone, which a model of Megatron-Core 0.19 may be without
        if extra == "sparse-attention" and not get("model", "dsa_indexer_rotate_activation", True):
            continue
        if missing := [each for each in modules if not has(each)]:
            what = _WORDS.get(kind, f"model.experimental_attention_variant = {kind!r}")
            yield (
                f"{what}: the kernels of {' and '.join(missing)} are not installed; install cloudai-mbridge[{extra}]"
            )


def for_all(get: Get, has: Has, pattern: str) -> Iterator[str]:
    """Yield a message for everything whose package is missing. pattern: as in `for_layers`."""
    yield from for_switches(get, has)
    yield from for_optimizer(get, has)
    yield from for_exchange(get, has)
    yield from for_layers(get, has, pattern)
