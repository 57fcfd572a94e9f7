"""Layout overrides in a point's `extra_cmd_args`: one table, and recomputation."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import MODEL_FIELDS
from cloudai_mbridge.estimate.memory.adapters import FIELDS, adapters_of
from cloudai_mbridge.estimate.memory.layout import RECOMPUTE_METHODS, Granularity, ParallelLayout, Recompute
from cloudai_mbridge.models.cmd_args import ARGUMENTS, NOT_READ, ResolvedCmdArgs
from cloudai_mbridge.recipes.apply import parse_value

# key of extra_cmd_args -> field of the layout, and its type
_FIELDS: dict[str, tuple[str, type]] = {
    "ddp.use_distributed_optimizer": ("use_distributed_optimizer", bool),
    "optimizer.use_distributed_optimizer": ("use_distributed_optimizer", bool),
    "ddp.grad_reduce_in_fp32": ("grad_reduce_in_fp32", bool),
    "mixed_precision.grad_reduce_in_fp32": ("grad_reduce_in_fp32", bool),
    "mixed_precision.fp8_param_gather": ("fp8_param_gather", bool),
    "mixed_precision.fp8_param": ("fp8_param_gather", bool),
    "ddp.use_megatron_fsdp": ("use_megatron_fsdp", bool),
    "dist.use_megatron_fsdp": ("use_megatron_fsdp", bool),
    "ddp.outer_dp_sharding_strategy": ("outer_dp_sharding_strategy", str),
    "model.sequence_parallel": ("sequence_parallel", bool),
    "optimizer.optimizer_offload_fraction": ("optimizer_offload_fraction", float),
}
_OFFLOAD = "optimizer.optimizer_cpu_offload"
_RECOMPUTE = {
    f"model.recompute_{name}": kind
    for name, kind in {"granularity": str, "method": str, "num_layers": int, "modules": list}.items()
}
ADAPTERS = "peft._target_"
_OF_ADAPTERS = frozenset({ADAPTERS, *(f"peft.{name}" for name in FIELDS)})
# The keys, without a sign of Hydra's
LAYOUT_KEYS = frozenset({*_FIELDS, *_RECOMPUTE, _OFFLOAD})


def apply_overrides(layout: ParallelLayout, extra: Mapping[str, str]) -> ParallelLayout:
    """Return the layout with the overrides of `extra_cmd_args`; BadInput if a value has the wrong type."""
    layout = _with_adapters(layout, extra)
    given = {name: _read(name, key, text) for key, text in extra.items() if (name := key.lstrip("+")) in LAYOUT_KEYS}
    if not given:
        return layout
    changes = {_FIELDS[name][0]: value for name, value in given.items() if name in _FIELDS}
    if _OFFLOAD in given:
        changes["optimizer_offload_fraction"] = changes.get("optimizer_offload_fraction", 1.0) * given[_OFFLOAD]
    else:  # Megatron-Core reads the fraction only then
        changes.pop("optimizer_offload_fraction", None)
    if asked := {name.removeprefix("model.recompute_"): value for name, value in given.items() if name in _RECOMPUTE}:
        changes["recompute"] = _recompute(layout.recompute, **asked)
    return replace(layout, **changes)


def _with_adapters(layout: ParallelLayout, extra: Mapping[str, str]) -> ParallelLayout:
    section = {
        name.removeprefix("peft."): parse_value(text)
        for key, text in extra.items()
        if (name := key.lstrip("+")) in _OF_ADAPTERS
    }
    if not section or (layout.adapters is None and ADAPTERS not in extra and f"+{ADAPTERS}" not in extra):
        return layout
    return replace(layout, adapters=adapters_of(section, layout.adapters))


def _read(name: str, key: str, text: str) -> Any:
    kind = bool if name == _OFFLOAD else _RECOMPUTE.get(name) or _FIELDS[name][1]
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
