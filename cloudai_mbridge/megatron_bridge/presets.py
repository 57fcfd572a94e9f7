"""What Megatron-Bridge's launcher uses where a point says nothing: its performance presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

# The arguments of which the launcher fills in what the user leaves out.
UPSTREAM_DECIDES = (
    "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length",
    "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap",
    "recompute_num_layers", "recompute_modules", "activation_offload_layers", "pipeline_model_parallel_layout",
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """The launcher's defaults for one recipe, GPU, number format, task and variant.

    name: what upstream calls it.
    num_gpus: the job's size that it was made for.
    values: by our argument names (`UPSTREAM_DECIDES`); an argument that is absent here is not known.
        None means that upstream leaves it unset.
    """

    release: Release
    name: str
    num_gpus: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A point's arguments as the launcher trains them.

    args: its `model_fields_set` is the point's own: what the user said.
    from_preset: the arguments whose value in `args` is upstream's.
    unknown: the arguments that upstream decides, that the user does not say, and that are not known.
    preset: where the values come from; None where no preset is known.
    """

    args: ResolvedCmdArgs
    preset: Preset | None = None
    from_preset: frozenset[str] = frozenset()
    unknown: frozenset[str] = field(default=frozenset(UPSTREAM_DECIDES))


def find_preset(args: ResolvedCmdArgs, release: Release | None) -> Preset | None:
    """Return the preset that the launcher takes for these arguments, or None where it is not known."""
    return None


def why_no_preset(args: ResolvedCmdArgs, release: Release | None) -> str:
    """Say in a few words why `find_preset` returns None."""
    return "the release of Megatron-Bridge is not known"


def with_preset(args: ResolvedCmdArgs, preset: Preset | None) -> Resolved:
    """Return the arguments as the launcher resolves them: what the point says, else the preset, batch scaled."""
    return Resolved(args, preset)


def resolve_sizes(said: Mapping[str, Any], num_gpus: int, preset: Preset) -> dict[str, Any]:
    """Return `UPSTREAM_DECIDES` as the launcher resolves them; the fast path of `with_preset` for a sweep.

    said: the arguments of `UPSTREAM_DECIDES` that the point says, without None.
    """
    return {**preset.values, **said}
