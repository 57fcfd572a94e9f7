"""The request for an estimate: a point's recipe, resolved arguments and overrides, on a GPU; and its layout."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import MODEL_FIELDS, Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, factors_for, find_gpu
from cloudai_mbridge.estimate.memory.arguments import layout_of
from cloudai_mbridge.estimate.memory.layout import (
    FIELDS,
    MASTER_WEIGHTS,
    RECOMPUTE_METHODS,
    Granularity,
    Implementation,
    ParallelLayout,
    Recompute,
    adapters_of,
)
from cloudai_mbridge.estimate.memory.without_model import WithoutModel, without_model
from cloudai_mbridge.estimate.published import PublishedRow, published_of, rows_of_shape
from cloudai_mbridge.megatron_bridge.presets import Preset, describe, given_by, newest_release, with_preset
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, ARGUMENTS, NOT_READ, Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes.apply import parse_value
from cloudai_mbridge.recipes.load import Recipe
from cloudai_mbridge.recipes.presets import sections_of, with_preset_of
from cloudai_mbridge.training.flops import NEW, Formula

# key of extra_cmd_args -> field of the layout, and its type
_LAYOUT_FIELDS: dict[str, tuple[str, type]] = {
    "ddp.use_distributed_optimizer": ("use_distributed_optimizer", bool),
    "optimizer.use_distributed_optimizer": ("use_distributed_optimizer", bool),
    "ddp.grad_reduce_in_fp32": ("grad_reduce_in_fp32", bool),
    "mixed_precision.grad_reduce_in_fp32": ("grad_reduce_in_fp32", bool),
    "mixed_precision.fp8_param_gather": ("fp8_param_gather", bool),
    "mixed_precision.fp8_param": ("fp8_param_gather", bool),
    "mixed_precision.fp4_param_gather": ("fp8_param_gather", bool),
    "mixed_precision.fp4_param": ("fp8_param_gather", bool),
    "ddp.use_megatron_fsdp": ("use_megatron_fsdp", bool),
    "dist.use_megatron_fsdp": ("use_megatron_fsdp", bool),
    "ddp.outer_dp_sharding_strategy": ("outer_dp_sharding_strategy", str),
    "model.sequence_parallel": ("sequence_parallel", bool),
    "optimizer.optimizer_offload_fraction": ("optimizer_offload_fraction", float),
}
_OFFLOAD = "optimizer.optimizer_cpu_offload"
_OF_RECOMPUTE = {
    f"model.recompute_{name}": kind
    for name, kind in {"granularity": str, "method": str, "num_layers": int, "modules": list}.items()
}
ADAPTERS = "peft._target_"
_OF_ADAPTERS = frozenset({ADAPTERS, *(f"peft.{name}" for name in FIELDS)})
# The keys, without a sign of Hydra's
LAYOUT_KEYS = frozenset({*_LAYOUT_FIELDS, *_OF_RECOMPUTE, _OFFLOAD})


def apply_overrides(layout: ParallelLayout, extra: Mapping[str, str]) -> ParallelLayout:
    """Return the layout with the overrides of `extra_cmd_args`; BadInput if a value has the wrong type."""
    section = {
        name.removeprefix("peft."): parse_value(text)
        for key, text in extra.items()
        if (name := key.lstrip("+")) in _OF_ADAPTERS
    }
    if section and (layout.adapters is not None or ADAPTERS in extra or f"+{ADAPTERS}" in extra):
        layout = replace(layout, adapters=adapters_of(section, layout.adapters))
    given = {
        name: _read_override(name, key, text) for key, text in extra.items() if (name := key.lstrip("+")) in LAYOUT_KEYS
    }
    if not given:
        return layout
    changes = {_LAYOUT_FIELDS[name][0]: value for name, value in given.items() if name in _LAYOUT_FIELDS}
    if _OFFLOAD in given:
        changes["optimizer_offload_fraction"] = changes.get("optimizer_offload_fraction", 1.0) * given[_OFFLOAD]
    else:  # Megatron-Core reads the fraction only then
        changes.pop("optimizer_offload_fraction", None)
    if (share := changes.get("optimizer_offload_fraction")) is not None:  # of more than all it takes all
        changes["optimizer_offload_fraction"] = min(max(share, 0.0), 1.0)
    if asked := {
        name.removeprefix("model.recompute_"): value for name, value in given.items() if name in _OF_RECOMPUTE
    }:
        changes["recompute"] = _recompute(layout.recompute, **asked)
    return replace(layout, **changes)


def _read_override(name: str, key: str, text: str) -> Any:
    kind = bool if name == _OFFLOAD else _OF_RECOMPUTE.get(name) or _LAYOUT_FIELDS[name][1]
    value = parse_value(text)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadInput(f"extra_cmd_args: {key!r}: {text!r} is not {_NAMES[kind]}; correct it")
    return value


_NAMES = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
    list: "a list such as ['core_attn']",
}


def _recompute(
    before: Recompute,
    granularity: str | None = None,
    method: str | None = None,
    num_layers: int | None = None,
    modules: list[str] | None = None,
) -> Recompute:
    if method not in (None, *RECOMPUTE_METHODS):
        raise BadInput(f"extra_cmd_args: 'model.recompute_method': {method!r} is unknown; use uniform or block")
    if num_layers is not None and num_layers < 1:
        raise BadInput(f"extra_cmd_args: 'model.recompute_num_layers': {num_layers} layers; use at least 1")
    if granularity is None:
        if before.granularity is Granularity.NONE:  # Megatron-Core reads the others only with one
            return before
        granularity = before.granularity
    if granularity not in (Granularity.SELECTIVE, Granularity.FULL):
        what = f"'model.recompute_granularity': {granularity!r}"
        raise BadInput(f"extra_cmd_args: {what} is unknown; use selective or full")
    if granularity == Granularity.FULL:
        known = before if before.granularity is Granularity.FULL else Recompute()
        return Recompute(Granularity.FULL, method=method or known.method, num_layers=num_layers or known.num_layers)
    # Megatron-Core's default if no module is named
    chosen = frozenset(map(str, modules)) if modules is not None else before.modules or frozenset({"core_attn"})
    return Recompute(Granularity.SELECTIVE, chosen)


_NOT_READ = [name for name, argument in ARGUMENTS.items() if argument.estimated == NOT_READ]
_NO_MEMORY = {f"peft.{name}" for name in ("alpha", "lora_A_init_method", "lora_B_init_method", "dropout_position")}
_SECTIONS = ("model", "optimizer", "ddp", "dist", "mixed_precision", "comm_overlap", "train", "peft")
_HARMLESS = frozenset({"optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", *_NO_MEMORY, *_OF_ADAPTERS})
_HARMLESS |= {f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad")}


def not_considered(args: ResolvedCmdArgs, extra: Mapping[str, str], axes: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the arguments and keys of `extra_cmd_args` that no estimate reads. axes: arguments that a sweep sets."""
    swept = set(axes)
    arguments = [f"cmd_args.{name}" for name in _NOT_READ if name in swept or getattr(args, name)]
    return (*arguments, *(key for key in extra if _is_passed_over(key.lstrip("+"))))


def _is_passed_over(key: str) -> bool:
    section, _, field = key.partition(".")
    if section not in _SECTIONS or key in LAYOUT_KEYS or key in _HARMLESS:
        return False
    return not (section == "model" and field in MODEL_FIELDS)


T = TypeVar("T")
_IMPOSSIBLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn errors of arithmetic on impossible sizes into BadInput: an estimate never ends a plan."""
    try:
        yield
    except _IMPOSSIBLE as error:
        raise _refusal(what, error) from None


def _refusal(what: str, error: Exception) -> BadInput:
    return BadInput(f"{what}: {' '.join(str(error).split()) or type(error).__name__}")


def answer_or_why(name: str, answer: Callable[[], T], note: Callable[[str], None]) -> T | None:
    """Return the answer, or None and note the reason: as `refusing`, which would slow down a sweep."""
    try:
        return answer()
    except BadInput as error:
        note(str(error))
    except _IMPOSSIBLE as error:
        note(str(_refusal(f"{name} cannot be estimated", error)))
    return None


@dataclass(frozen=True)
class EstimateRequest:
    """A point to be estimated.

    args: with the recipe's defaults. extra: its `extra_cmd_args`. gpu: None if unknown, with the reason.
    as_published: the arguments as the published tables would give them; None: `args`.
    shipped: GPUs, micro-batch and batch with which upstream ships just this layout for this GPU.
    why_no_layout: the reason for unknown sizes, or "".
    expands_segments: torch's allocator grows its segments, as most presets set: then nothing is lost between tensors.
    filled_in: arguments filled in by Megatron-Bridge's launcher, with its release, or "".
    why_not_filled_in: the reason for no preset, or "".
    """

    recipe: Recipe
    args: ResolvedCmdArgs
    gpu: Gpu | None
    why_no_gpu: str = "no GPU is named"
    extra: Mapping[str, str] = field(default_factory=dict)
    formula: Formula = NEW
    as_published: ResolvedCmdArgs | None = None
    shipped: tuple[tuple[int, int, int], ...] = ()
    why_no_layout: str = ""
    expands_segments: bool = False
    filled_in: str = ""
    why_not_filled_in: str = ""

    @property
    def architecture(self) -> Architecture:
        """The model that the point trains; BadInput if a size is impossible."""
        with refusing(f"recipe {self.recipe.name}: the model cannot be estimated"):
            model = architecture(self.recipe, self.args, self.extra)
            if model.num_moe_experts is not None and model.moe_router_topk > model.num_moe_experts:
                what = f"model.moe_router_topk = {model.moe_router_topk} of {model.num_moe_experts} experts"
                raise BadInput(f"recipe {self.recipe.name}: {what}; use {model.num_moe_experts} or less")
            return model

    @property
    def trains_adapters(self) -> bool:
        """Whether the weights are frozen, by the task or by a section `peft` in `extra`."""
        return self.args.task in ADAPTER_TASKS or any(key.lstrip("+") == ADAPTERS for key in self.extra)

    def published(self, model: Architecture) -> tuple[PublishedRow, ...]:
        """Return the published rows of exactly this point; a point with overrides has none."""
        return self._rows(published_of, model)

    def published_shape(self, model: Architecture) -> tuple[PublishedRow, ...]:
        """Return the published rows that agree with this point in all but GPUs and batch."""
        return self._rows(rows_of_shape, model)

    def without_model(self, layout: ParallelLayout) -> WithoutModel:
        """Return the settings of the point that change memory in a way that is not modelled."""
        sections = sections_of(self.recipe, self.args, None, ())
        others = tuple(key for key in not_considered(self.args, self.extra) if not key.startswith("cmd_args."))
        return without_model(sections, self.extra, layout, others)

    def _rows(self, find: Callable[..., tuple[PublishedRow, ...]], model: Architecture) -> tuple[PublishedRow, ...]:
        if self.gpu is None or self.extra:
            return ()
        return find(self.as_published or self.args, self.gpu.name, model.mtp_num_layers)

    def layout_of(self, model: Architecture) -> ParallelLayout:
        """Return the distribution of the point's model over the GPUs.

        BadInput: sizes do not fit together or are unknown, or the number format is unknown.
        """
        if self.why_no_layout:
            raise BadInput(self.why_no_layout)
        with refusing("the layout cannot be estimated"):
            gpu = None if self.gpu is None else self.gpu.name
            layout = layout_of(self.args, self.recipe, gpu=gpu, mtp_num_layers=model.mtp_num_layers)
            if layout.seq_length is None:
                layout = replace(layout, seq_length=model.seq_length)
            if self.gpu is not None and not self.gpu.is_known:  # a processor has no fused kernels
                layout = replace(layout, implementation=Implementation.TORCH, optimizer_bytes=MASTER_WEIGHTS)
            return apply_overrides(layout, self.extra)


NO_GPU = "neither cmd_args.gpu_type nor the system's gpu_type names the GPU; set gpu_type, such as 'h100'"


def gpu_of(args: ResolvedCmdArgs, system: System | None, *, is_set: bool | None = None) -> tuple[Gpu | None, str]:
    """Return the GPU of a point on a system, or None and the reason.

    `cmd_args.gpu_type` if it is set, else the system's `gpu_type`; else, on a cluster, the upstream launcher's
    default. is_set: whether gpu_type is; None looks it up. BadInput: the system's calibration cannot be read.
    """
    name, where = args.gpu_type, "cmd_args.gpu_type"
    if not ("gpu_type" in args.model_fields_set if is_set is None else is_set):
        if system is not None and system.gpu_type:
            name, where = system.gpu_type, f"system {system.name!r}: gpu_type"
        elif args.launcher is Launcher.EMBEDDED or (system is not None and system.is_one_machine):
            return None, NO_GPU
    gpu = find_gpu(name)
    return (gpu_on(gpu, system), "") if gpu else (None, f"{where}: {name!r} is not a GPU with known figures")


def gpu_on(gpu: Gpu, system: System | None) -> Gpu:
    """Return the GPU with the measured factors of a system; BadInput: the system's calibration cannot be read."""
    measured = factors_for(system, gpu.name)
    return gpu if measured is None else replace(gpu, measured=measured)


# Required for an estimate; the others are taken as unset if unknown
_NEEDED = ("tp", "pp", "cp", "ep", "mb", "gb")
# Arguments of a point in a row of the published tables
_PUBLISHED = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "use_megatron_fsdp")
_BATCH = ("mb", "gb")
_DISPATCHER = "moe_flex_dispatcher_backend"
_MODEL = ("num_layers", "hidden_size", "vocab_size", "first_k_dense_replace", "num_distributed_optimizer_instances")


def trained_question(
    recipe: Recipe,
    args: ResolvedCmdArgs,
    preset: Preset | None,
    why_no_preset: str,
    gpu: Gpu | None,
    why_no_gpu: str,
    extra: Mapping[str, str],
    formula: Formula = NEW,
) -> EstimateRequest:
    """Return the estimate request of a point. args: its own, with the sizes of the recipe's model."""
    if preset is not None and args.task == "pretrain" and preset.release.key == newest_release().key:
        recipe = with_preset_of(recipe, preset)  # the blocks of recipes are of this release
    resolved = with_preset(args, preset)
    has_experts = recipe.default("model", "num_moe_experts") is not None
    if missing := [name for name in _NEEDED if name in resolved.unknown and (has_experts or name != "ep")]:
        why = f"Megatron-Bridge decides {', '.join(missing)}, and {why_no_preset}; set them"
        return EstimateRequest(recipe, args, gpu, why_no_gpu, extra, formula, why_no_layout=why)
    trained, published = _with_dispatcher(resolved.args, preset), None
    if not trained.seq_length:
        trained = trained.model_copy(update={"seq_length": recipe.default("model", "seq_length")})
    if preset is not None:
        published = args.model_copy(update={name: getattr(trained, name) for name in _PUBLISHED})
    return EstimateRequest(
        recipe,
        trained,
        gpu,
        why_no_gpu,
        extra,
        formula,
        published,
        shipped_by(recipe, args, preset, gpu, extra),
        expands_segments=expands_segments(preset),
        filled_in=describe(resolved),
    )


_ALLOCATOR, _EXPANDS = "PYTORCH_CUDA_ALLOC_CONF=", "expandable_segments:True"


def expands_segments(preset: Preset | None) -> bool:
    """Return whether a preset's variables let torch's allocator grow its segments."""
    variables = preset.values.get("env_vars") or () if preset else ()
    return any(text.startswith(_ALLOCATOR) and _EXPANDS in text for text in variables)


def _with_dispatcher(args: ResolvedCmdArgs, preset: Preset | None) -> ResolvedCmdArgs:
    """Return the arguments with the preset's dispatcher of experts, unless the point has one.

    Of presets before 0.6 "deepep" is the field's default, which the plain dispatcher does not read.
    """
    if preset is None or args.moe_flex_dispatcher_backend or preset.values.get(_DISPATCHER) != "hybridep":
        return args
    return args.model_copy(update={_DISPATCHER: "hybridep"})


def shipped_by(
    recipe: Recipe, args: ResolvedCmdArgs, preset: Preset | None, gpu: Gpu | None, extra: Mapping[str, str]
) -> tuple[tuple[int, int, int], ...]:
    """Return GPUs and batch of the preset, which upstream ships for this GPU, if the point changes nothing else.

    args: as the point sets them.
    """
    if preset is None or gpu is None or gpu.name != preset.row.gpu or extra:
        return ()
    if not all(isinstance(preset.values.get(name), int) for name in _BATCH):
        return ()
    changed = [
        name for name, value in given_by(args).items() if name not in _BATCH and value != preset.values.get(name)
    ]
    changed += [name for name in _MODEL if getattr(args, name) not in (None, recipe.default("model", name))]
    return () if changed else ((preset.num_gpus, preset.values["mb"], preset.values["gb"]),)
