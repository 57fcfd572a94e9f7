"""Find and apply the performance preset that Megatron-Bridge's launcher uses for arguments left unset."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cloudai_mbridge.megatron_bridge.presets.catalog import catalog
from cloudai_mbridge.megatron_bridge.presets.resolve import Preset as Preset
from cloudai_mbridge.megatron_bridge.presets.resolve import effective
from cloudai_mbridge.megatron_bridge.presets.resolve import resolve_sizes as resolve_sizes
from cloudai_mbridge.megatron_bridge.presets.rows import PresetRequest
from cloudai_mbridge.megatron_bridge.release import Release, known_releases
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, Launcher, ResolvedCmdArgs, names_in

# Arguments that the launcher fills in if the user leaves them unset.
UPSTREAM_DECIDES = (
    "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length",
    "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap",
    "recompute_num_layers", "recompute_modules", "activation_offload_layers", "pipeline_model_parallel_layout",
)  # fmt: skip
# Values that leave an argument to the launcher
UNSET: tuple[Any, ...] = (None, "", [])
LISTS = ("cuda_graph_scope", "recompute_modules")
_ADAPTERS = "peft"  # as the newest release's presets have it


@dataclass(frozen=True)
class Resolved:
    """A point's arguments as the launcher trains them.

    args: its `model_fields_set` is the point's own: what the user set.
    from_preset: the arguments whose value in `args` is upstream's.
    unknown: the arguments that upstream decides, that the user does not say, and that are not known.
    preset: where the values come from; None where no preset is known.
    """

    args: ResolvedCmdArgs
    preset: Preset | None = None
    from_preset: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset(UPSTREAM_DECIDES)


def find_preset(args: ResolvedCmdArgs, release: Release | None) -> Preset | None:
    """Return the preset that the launcher takes for these arguments, or None if unknown."""
    if release is None or args.use_recipes or args.launcher is not Launcher.MEGATRON_BRIDGE:
        return None
    return _preset(release, _request(args), args.num_gpus)


def newest_release() -> Release:
    """Return the newest release that the shipped data describe."""
    return Release(known_releases()[-1]["version"], "the newest known release")


def loop_preset(args: ResolvedCmdArgs, gpu: str) -> Preset | None:
    """Return the preset of the newest release for a point of the embedded loop on a GPU; None if it lacks one.

    gpu: as `gpu_label` returns it; "" if unknown.
    """
    if args.launcher is not Launcher.EMBEDDED or not gpu or args.use_recipes:
        return None
    return _preset(newest_release(), _loop_request(args, gpu), args.num_gpus)


def why_no_variant(args: ResolvedCmdArgs, gpu: str) -> str:
    """Return why `loop_preset` returns None for a point that names a variant."""
    if args.use_recipes:
        return "use_recipes = true takes no preset"
    known = catalog(newest_release())
    assert known is not None  # it is shipped
    return known.missing(_loop_request(args, gpu), args.num_gpus)


def _loop_request(args: ResolvedCmdArgs, gpu: str) -> PresetRequest:
    task = _ADAPTERS if args.task in ADAPTER_TASKS else args.task
    return replace(_request(args), gpu=gpu, task=task)


def why_no_preset(args: ResolvedCmdArgs, release: Release | None) -> str:
    """Return a short reason why `find_preset` returns None."""
    if args.launcher is not Launcher.MEGATRON_BRIDGE:
        return f"the embedded loop takes presets of {newest_release().version} without being asked"
    if release is None:
        return "[[git_repos]] pins no known release of Megatron-Bridge"
    if args.use_recipes:
        return "use_recipes = true takes a library recipe instead of a performance preset"
    request = _request(args)
    known = catalog(release)
    if known is None:
        which = release.version if release.is_known else f"at this commit ({release.source} says {release.version})"
        return f"no presets of Megatron-Bridge {which} are known"
    return f"Megatron-Bridge {release.version} has {known.missing(request, args.num_gpus)}"


def given_by(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the arguments of `UPSTREAM_DECIDES` that a point sets, lists as lists."""
    return given_values({name: getattr(args, name) for name in UPSTREAM_DECIDES if name in args.model_fields_set})


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are set, lists as lists."""
    return {name: names_in(value) if name in LISTS else value for name, value in values.items() if value not in UNSET}


def with_preset(args: ResolvedCmdArgs, preset: Preset | None) -> Resolved:
    """Return the arguments as the launcher resolves them: the point's, else the preset's, with the batch scaled."""
    given = given_by(args)
    if preset is None:
        return Resolved(args, None, frozenset(), frozenset(UPSTREAM_DECIDES) - given.keys())
    result = resolve_sizes(given, args.num_gpus, preset)
    known = {name: result[name] for name in UPSTREAM_DECIDES if name in result}
    theirs = {name: value for name, value in known.items() if name not in given or value != given[name]}
    resolved = args.model_copy()
    resolved.__dict__.update(theirs)  # not the `update` of pydantic, which would count them as set
    return Resolved(resolved, preset, frozenset(theirs), frozenset(UPSTREAM_DECIDES) - known.keys())


def _request(args: ResolvedCmdArgs) -> PresetRequest:
    family, recipe = args.model_family_name.lower(), args.model_recipe_name.lower()
    variant = (args.config_variant or "").lower()
    return PresetRequest(family, recipe, args.task, args.gpu_type, args.compute_dtype, variant)


@lru_cache(maxsize=4096)
def _preset(release: Release, request: PresetRequest, num_gpus: int) -> Preset | None:
    known = catalog(release)
    row = known.find(request, num_gpus) if known else None
    if known is None or row is None:
        return None
    name = " ".join(filter(None, row.key))
    before_0_5, as_in_0_6 = release.key < (0, 5), known.source.is_flat
    layouts = known.source.layouts.get(row.recipe, {})
    return Preset(release, name, row.num_gpus, effective(row.values), row, before_0_5, as_in_0_6, layouts)


def origin(preset: Preset) -> str:
    """Return a short description of a preset value's source."""
    return f"preset {preset.name}, {preset.release.version}"


def describe(resolved: Resolved, overridden: frozenset[str] = frozenset()) -> str:
    """Describe the values that the launcher fills in for a point and no override replaces; "" without any."""
    if resolved.preset is None or not resolved.from_preset:
        return ""
    filled_in = resolved.from_preset - overridden
    names = sorted(name for name in filled_in if getattr(resolved.args, name) not in UNSET)
    values = ((name, getattr(resolved.args, name)) for name in names)
    texts = [f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}" for name, value in values]
    return f"{origin(resolved.preset)} ({resolved.preset.release.source}): {', '.join(texts)}"
