"""Performance presets of Megatron-Bridge's launcher: its values for arguments that a point leaves unset.

A preset is joined with the user's arguments as the launcher's `set_user_overrides` and `set_post_overrides` of its
release do it. The embedded loop takes the newest known release's presets, for the arguments that it uses, with one
difference: the test always wins, even if upstream's launcher would keep the preset (`use_megatron_fsdp = false`), and
"" unsets an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from cloudai_mbridge.megatron_bridge.preset_rows import PresetRow, catalog
from cloudai_mbridge.megatron_bridge.release import Release, known_releases
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, ARGUMENTS, Launcher, ResolvedCmdArgs, names_in

# Arguments that the launcher fills in if the user leaves them unset.
UPSTREAM_DECIDES = (
    "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length",
    "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap",
    "recompute_num_layers", "recompute_modules", "activation_offload_layers", "pipeline_model_parallel_layout",
)  # fmt: skip
# Those of them with a field in the loop's configuration
ACTS_ON = tuple(name for name in UPSTREAM_DECIDES if ARGUMENTS[name].config)
# A test's values, in TOML, that replace a preset's setting in the embedded loop by none
SWITCHED_OFF = {
    "use_megatron_fsdp": "false", "nccl_ub": "false", "moe_a2a_overlap": "false",
    "cuda_graph_impl": '"none"', "activation_offload_layers": "0",
}  # fmt: skip
# Values that leave an argument to the launcher
UNSET: tuple[Any, ...] = (None, "", [])
LISTS = ("cuda_graph_scope", "recompute_modules")
# Options that switch these on take effect; options that switch them off do nothing.
_SWITCHES = ("use_megatron_fsdp", "nccl_ub", "moe_a2a_overlap")
_RECOMPUTE = ("recompute_num_layers", "recompute_modules")
_GRAPH = ("cuda_graph_impl", "cuda_graph_scope")
# Default modules of Megatron-Core's selective recomputation (transformer_config.py).
_SELECTIVE = ["core_attn"]
# If the user sets any of these, the result does not follow from the preset alone.
_INVOLVED = frozenset((*_SWITCHES, *_RECOMPUTE, *_GRAPH, "activation_offload_layers"))


@dataclass(frozen=True)
class Preset:
    """The launcher's defaults for one recipe, GPU, number format, task and variant.

    name: recipe, task, GPU, number format and variant, as upstream writes them.
    num_gpus: the job's size that it was made for.
    values: by our argument names (`UPSTREAM_DECIDES`, and recompute_granularity, recompute_method,
        moe_flex_dispatcher_backend and sequence_parallel); what is absent here is not known. None means that upstream
        leaves it unset.
    before_0_5, as_in_0_6: whose rules its release has: 0.5 has neither's.
    """

    release: Release
    name: str
    num_gpus: int
    values: Mapping[str, Any]
    row: PresetRow = field(repr=False)
    before_0_5: bool = field(repr=False)
    as_in_0_6: bool = field(repr=False)
    layouts: Mapping[tuple[int, int], str | None] = field(repr=False, default_factory=dict)


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


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without settings that have no effect: of recomputation, and the scope of disabled CUDA graphs."""
    result = {name: value for name, value in values.items() if name not in _RECOMPUTE}
    if {"recompute_granularity", *_RECOMPUTE} <= values.keys():
        granularity, modules = values["recompute_granularity"], values["recompute_modules"]
        result["recompute_modules"] = (_SELECTIVE if modules is None else modules) if granularity == "selective" else []
        if granularity != "full":
            result["recompute_num_layers"] = None
        elif result.get("recompute_method") == "block":  # not uniform: every layer, in groups of that many
            result["recompute_num_layers"] = values["recompute_num_layers"]
    if result.get("cuda_graph_impl") == "none":
        result["cuda_graph_scope"] = []
    return result


def resolve_sizes(given: Mapping[str, Any], num_gpus: int, preset: Preset) -> dict[str, Any]:
    """Return the sizes as the launcher resolves them; missing sizes are unknown.

    given: the point's values of `UPSTREAM_DECIDES`, as `given_by` returns them.
    """
    result = _joined(given, preset)
    if preset.layouts:
        _rederive_layout(result, given, preset)
    if "gb" not in given:
        result["gb"] = _scaled_batch(result, num_gpus, preset)
        if result["gb"] is None:
            del result["gb"]
    return result


def _joined(given: Mapping[str, Any], preset: Preset) -> dict[str, Any]:
    """Return a preset joined with the given values, with the batch unscaled."""
    result = {**preset.values, **given}
    if "tp" in given:
        result["sequence_parallel"] = given["tp"] > 1
    if _INVOLVED.isdisjoint(given):
        return result
    # until 0.4, 0 layers to offload override the preset
    for name in _SWITCHES if preset.before_0_5 else (*_SWITCHES, "activation_offload_layers"):
        if name in given and not given[name]:
            _keep(result, preset.values, name)
    if "recompute_modules" in given:
        result |= {"recompute_granularity": "selective", "recompute_num_layers": None}
    elif "recompute_num_layers" in given:
        result |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_modules": []}
    if not given.keys().isdisjoint(_GRAPH):
        _given_graph(result, given, preset)
    return result


def _keep(result: dict[str, Any], known: Mapping[str, Any], name: str) -> None:
    """Keep the preset's value, or drop the name if that is unknown."""
    result.pop(name, None)
    if name in known:
        result[name] = known[name]


def _given_graph(result: dict[str, Any], given: Mapping[str, Any], preset: Preset) -> None:
    if "cuda_graph_scope" not in given:
        _keep(result, preset.row.values, "cuda_graph_scope")
    refused = "transformer_engine"  # the launcher stops: with it, the scope full_iteration is an error
    if preset.as_in_0_6 and given.get("cuda_graph_scope") == ["full_iteration"]:
        if result.get("cuda_graph_impl") not in ("none", refused):
            result["cuda_graph_impl"] = "full_iteration"
        result["cuda_graph_scope"] = ["full_iteration"] if result.get("cuda_graph_impl") == refused else []
    if result.get("cuda_graph_impl") == "none":
        result["cuda_graph_scope"] = []


def _rederive_layout(result: dict[str, Any], given: Mapping[str, Any], preset: Preset) -> None:
    """Set the pipeline layout that the launcher derives from a given pp or vp, for recipes with such layouts."""
    name = "pipeline_model_parallel_layout"
    if name in given or not ("pp" in given or "vp" in given):
        return
    if "pp" not in result or "vp" not in result:
        result.pop(name, None)
        return
    sizes = (result["pp"] or 1, result["vp"] or 1)
    if preset.row.recipe == "deepseek_v3":
        if sizes in preset.layouts:
            result[name] = preset.layouts[sizes]
    elif result.get(name) is None or result[name] in preset.layouts.values():  # a layout of its own stands
        result[name] = preset.layouts.get(sizes)


def _scaled_batch(result: Mapping[str, Any], num_gpus: int, preset: Preset) -> int | None:
    """Return the global batch, scaled to the job's size; None if the launcher rejects scaling it.

    It follows the data-parallel size from 0.6 on, else the number of GPUs; a batch that the preset's builder has
    changed does so only until 0.4.
    """
    row, own = preset.row, preset.row.values.get("gb")
    if num_gpus == row.num_gpus or not isinstance(own, int):
        return own
    base = own if row.base_gb is None else row.base_gb
    if preset.as_in_0_6:
        before, after = _data_parallel(row.values, row.num_gpus), _data_parallel(result, num_gpus)
        if not before or not after or base * after % before:
            return None
        return base * after // before
    if base != own and not preset.before_0_5:
        return own
    return int(base / row.num_gpus * num_gpus)


def _data_parallel(values: Mapping[str, Any], num_gpus: int) -> int | None:
    """Return the data-parallel size, None if the sizes are unknown or do not divide the job."""
    sizes = [values.get(name) for name in ("tp", "pp", "cp")]
    size = prod(size if isinstance(size, int) else 0 for size in sizes)
    return None if size < 1 or num_gpus % size else num_gpus // size


def find_preset(args: ResolvedCmdArgs, release: Release | None) -> Preset | None:
    """Return the preset that the launcher takes for these arguments, or None if unknown."""
    if release is None or args.use_recipes or args.launcher is not Launcher.MEGATRON_BRIDGE:
        return None
    return _preset(release, _wanted(args))


def newest_release() -> Release:
    """Return the newest release that the shipped data describe."""
    return Release(known_releases()[-1]["version"], "the newest known release")


def loop_preset(args: ResolvedCmdArgs, gpu: str) -> Preset | None:
    """Return the preset of the newest release for a point of the embedded loop on a GPU; None if it lacks one.

    gpu: as `gpu_label` returns it; "" if unknown.
    """
    if args.launcher is not Launcher.EMBEDDED or not gpu or args.use_recipes:
        return None
    return _preset(newest_release(), _wanted_by_loop(args, gpu))


def has_presets(recipe: str) -> bool:
    """Return whether the newest release has presets of a recipe, for any GPU."""
    known = catalog(newest_release())
    return known is not None and any(row.recipe == recipe.lower() for row in known.rows)


def why_no_variant(args: ResolvedCmdArgs, gpu: str) -> str:
    """Return why `loop_preset` returns None for a point that names a variant."""
    if args.use_recipes:
        return "use_recipes = true takes no preset"
    known = catalog(newest_release())
    assert known is not None  # it is shipped
    return known.missing(_wanted_by_loop(args, gpu))


def _wanted_by_loop(args: ResolvedCmdArgs, gpu: str) -> PresetRow:
    task = "peft" if args.task in ADAPTER_TASKS else args.task  # as the newest release's presets have it
    return replace(_wanted(args), gpu=gpu, task=task)


def why_no_preset(args: ResolvedCmdArgs, release: Release | None) -> str:
    """Return a short reason why `find_preset` returns None."""
    if args.launcher is not Launcher.MEGATRON_BRIDGE:
        return f"the embedded loop takes presets of {newest_release().version} without being asked"
    if release is None:
        return "[[git_repos]] pins no known release of Megatron-Bridge"
    if args.use_recipes:
        return "use_recipes = true takes a library recipe instead of a performance preset"
    known = catalog(release)
    if known is None:
        which = (
            release.version if release.is_known else f"at this commit ({release.source} has version {release.version})"
        )
        return f"no presets of Megatron-Bridge {which} are known"
    return f"Megatron-Bridge {release.version} has {known.missing(_wanted(args))}"


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


def _wanted(args: ResolvedCmdArgs) -> PresetRow:
    family, recipe = args.model_family_name.lower(), args.model_recipe_name.lower()
    variant = (args.config_variant or "").lower()
    return PresetRow(family, recipe, args.task, args.gpu_type, args.compute_dtype, variant, args.num_gpus)


@lru_cache(maxsize=4096)
def _preset(release: Release, wanted: PresetRow) -> Preset | None:
    known = catalog(release)
    row = known.find(wanted) if known else None
    if known is None or row is None:
        return None
    name = " ".join(filter(None, row.key))
    before_0_5, as_in_0_6 = release.key < (0, 5), known.is_flat
    layouts = known.layouts.get(row.recipe, {})
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


def with_loop_preset(args: ResolvedCmdArgs, preset: Preset | None) -> Resolved:
    """Return the arguments with the preset's values; these are marked as set, so that reports contain them."""
    if preset is None:
        return Resolved(args, None, frozenset(), frozenset())
    values = filled_in(given_to_loop(args), args.num_gpus, preset)
    filled = args.model_copy(update={name: value for name, value in values.items() if value is not None})
    return Resolved(filled, preset, frozenset(values), frozenset())


def given_to_loop(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the arguments of `ACTS_ON` that a point sets."""
    return {
        name: value for name in ACTS_ON if name in args.model_fields_set and (value := getattr(args, name)) is not None
    }


def filled_in(given: Mapping[str, Any], num_gpus: int, preset: Preset) -> dict[str, Any]:
    """Return a preset's values of `ACTS_ON`; None: unset. A batch that the launcher would not scale is left out.

    given: as `given_to_loop` returns it.
    """
    lists = {name: names_in(value) for name, value in given.items() if name in LISTS}
    result = resolve_sizes({**given, **lists}, num_gpus, preset)
    values = {name: result[name] or None for name in ACTS_ON if name in result and name not in given}
    if values.get("ep") == 1:  # same as unset; a dense model has no experts to name
        values["ep"] = None
    if values.get("cuda_graph_impl") == "none":
        values["cuda_graph_impl"] = None
    return values
