"""Optional packages: requirements of a configuration, and installed packages."""

import importlib
from importlib.util import find_spec
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.provenance import is_installed

NVRX = "nvidia_resiliency_ext"
MODELOPT = "modelopt"
EMERGING = "emerging_optimizers"
OF_EMERGING = ("muon", "dist_muon", "lion", "soap")


def check_packages(cfg: ConfigContainer) -> None:
    """Refuse a configuration that needs a package which is not installed. Every rank calls it, before it starts.

    Raises ConfigError: the first such key, with the package and the remedy.
    """
    for key, module, project in (
        ("ft.enable_ft_package", NVRX, "nvidia-resiliency-ext"),
        ("nvrx_straggler.enabled", NVRX, "nvidia-resiliency-ext"),
        ("inprocess_restart.enabled", NVRX, "nvidia-resiliency-ext"),
        ("logger.log_energy", "pynvml", "nvidia-ml-py"),
        ("model.restore_modelopt_state", MODELOPT, "'cloudai-mbridge[modelopt]'"),
        ("tensor_inspect.enabled", "nvdlfw_inspect", "nvdlfw-inspect"),
    ):
        section, _, switch = key.partition(".")
        if getattr(getattr(cfg, section), switch, False) and not is_installed(module):
            raise ConfigError(
                f"{key}=true needs the Python package {project}, which is not installed: "
                f"run `pip install {project}` in the job's environment, or set {key}=false"
            )
    name = cfg.optimizer.optimizer
    if name in ("adam", "sgd"):
        return
    where = f"optimizer.optimizer = {name!r}"
    if name not in OF_EMERGING:
        raise ConfigError(f"{where}: use one of adam, sgd, {', '.join(OF_EMERGING)}")
    if find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        raise ConfigError(f"{where} needs Megatron-Core 0.18 or later, which needs Python 3.12; use 'adam'")
    if not is_installed(EMERGING):
        raise ConfigError(
            f"{where} needs the Python package emerging-optimizers, which is not installed: run `pip install"
            " 'cloudai-mbridge[emerging]'` in the job's environment, or use 'adam'"
        )
    layer_wise = "optimizer.use_layer_wise_distributed_optimizer"
    is_layer_wise = getattr(cfg.optimizer, layer_wise.partition(".")[2], False)  # since Megatron-Core 0.18
    if (name == "dist_muon" or is_layer_wise) and not (cfg.optimizer.bf16 or cfg.optimizer.fp16):
        fact, other = (f"{layer_wise} = True", "False") if is_layer_wise else (where, "'muon'")
        raise ConfigError(f"{fact} trains in 16 bits only; use mixed_precision = 'bf16_mixed', or {other}")


def nvrx(part: str) -> Any:
    """Import a part of NVIDIA Resiliency Extension, such as "fault_tolerance".

    Raises ImportError: the package is not installed, or does not load on this machine.
    """
    return importlib.import_module(f"{NVRX}.{part}")
