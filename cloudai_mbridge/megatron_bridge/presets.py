"""What Megatron-Bridge's launcher uses where a point says nothing: its performance presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs


@dataclass(frozen=True)
class Preset:
    """The launcher's defaults for one recipe, GPU, number format, task and variant.

    name: what upstream calls it.
    num_gpus: the job's size that it was made for.
    values: by our argument names (tp, pp, cp, vp, ep, et, mb, gb, use_megatron_fsdp, cuda_graph_impl, ...);
        an argument that is absent here is not known. None means that upstream leaves it unset.
    """

    release: Release
    name: str
    num_gpus: int
    values: Mapping[str, Any]


def find_preset(args: ResolvedCmdArgs, release: Release | None) -> Preset | None:
    """Return the preset that the launcher takes for these arguments, or None where it is not known."""
    return None


def with_preset(args: ResolvedCmdArgs, preset: Preset) -> ResolvedCmdArgs:
    """Return the arguments as the launcher resolves them: what the point says, else the preset, batch scaled."""
    return args
