"""What a point sets, and no estimate reads, although it may change memory or time: it is named, not passed over."""

from collections.abc import Iterable, Mapping

from cloudai_mbridge.estimate.architecture import MODEL_FIELDS
from cloudai_mbridge.estimate.overrides import LAYOUT_KEYS
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

_ARGUMENTS = (
    *("fp8_recipe", "use_tokendrop", "nccl_ub", "packed_sequence", "head_only"),
    *("optimizer_type", "moe_flex_dispatcher_backend", "deterministic", "num_moe_experts", "lock_gpu_freq"),
    "peak_mem_clk",
)
_SECTIONS = ("model", "optimizer", "ddp", "dist", "mixed_precision", "comm_overlap", "train")
_HARMLESS = frozenset({"optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay"})


def not_considered(args: ResolvedCmdArgs, extra: Mapping[str, str], axes: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the arguments and keys of `extra_cmd_args`. axes: arguments that a sweep sets."""
    swept = set(axes)
    arguments = [f"cmd_args.{name}" for name in _ARGUMENTS if name in swept or getattr(args, name)]
    return (*arguments, *(key for key in extra if _is_passed_over(key.lstrip("+"))))


def _is_passed_over(key: str) -> bool:
    section, _, field = key.partition(".")
    if section not in _SECTIONS or key in LAYOUT_KEYS or key in _HARMLESS:
        return False
    return not (section == "model" and field in MODEL_FIELDS)
