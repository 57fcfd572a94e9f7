"""What the published tables leave out: settings of the preset that a container's release has for a row."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.megatron_bridge.preset_rows import PresetRow, catalog
from cloudai_mbridge.megatron_bridge.presets import effective
from cloudai_mbridge.megatron_bridge.release import Release, known_releases
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

_SWITCHES = ("cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap", "recompute_modules", "recompute_num_layers")
_DISPATCHER = "moe_flex_dispatcher_backend"


def of_preset(args: ResolvedCmdArgs, container: str) -> dict[str, Any]:
    """Return the settings of the preset that is nearest to a row: sizes, number format, release, GPUs, in this order.

    The dispatcher of a preset that leaves it to the machine is that of the next release that names it. "deepep" is the
    default of a field that the plain dispatcher does not read.
    """
    releases = [Release(str(known["version"]), "") for known in known_releases() if "presets" not in known]

    def nearness(found: tuple[Release, PresetRow]) -> tuple[bool, ...]:
        release, row = found
        sizes = [(row.values.get(name) or 1) == (getattr(args, name) or 1) for name in _OF_LAYOUT]
        is_own = release.version == _RELEASES[container]
        return all(sizes), row.compute_dtype == args.compute_dtype, is_own, row.num_gpus == args.num_gpus

    presets = [(release, row) for release in releases for row in _rows_of(release, args)]
    if not presets:
        return {}
    _, nearest = max(presets, key=nearness)
    later = (row for _, row in presets if row.key == nearest.key and _DISPATCHER in row.values)
    is_named = _DISPATCHER in nearest.values
    has_hybrid = any("HYBRID_EP" in name for name in nearest.values.get("env_vars") or ())
    backend = (nearest if is_named else next(later, nearest)).values.get(_DISPATCHER)
    found = {name: value for name, value in effective(nearest.values).items() if name in _SWITCHES}
    return {**found, _DISPATCHER: "hybridep" if has_hybrid or backend == "hybridep" else None}


def _rows_of(release: Release, args: ResolvedCmdArgs) -> Iterator[PresetRow]:
    known = catalog(release)
    wanted = (args.model_recipe_name, args.gpu_type, "pretrain")
    return (row for row in (known.rows if known else ()) if (row.recipe, row.gpu, row.task) == wanted)


_OF_LAYOUT = ("tp", "pp", "cp", "vp", "ep", "mb")
# The Megatron-Bridge of NeMo's containers; presets are known from 0.3 on
_RELEASES = {"25.09": "0.3.0", "25.11": "0.3.0", "26.02": "0.3.0", "26.02.01": "0.3.1", "26.04": "0.4.0"}
_RELEASES |= {"26.04.01": "0.4.2", "26.06": "0.5.0", "26.06.01": "0.5.1", "26.07": "0.6.0", "26.08": "0.6.0"}
