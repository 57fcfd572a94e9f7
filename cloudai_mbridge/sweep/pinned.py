"""The Megatron-Bridge that a test pins, the values that its launcher fills in for a point, and notes on these."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cloudai_mbridge.constraints import Lifted, RuleSet, Upstream
from cloudai_mbridge.constraints.rule import as_toml
from cloudai_mbridge.constraints.upstream import CHOOSING as PRESET_CHOOSING
from cloudai_mbridge.errors import counted
from cloudai_mbridge.megatron_bridge.environment import CONNECTIONS, gpu_label, recipe_environment
from cloudai_mbridge.megatron_bridge.preset_rows import FIELDS
from cloudai_mbridge.megatron_bridge.presets import (
    ACTS_ON,
    UNSET,
    UPSTREAM_DECIDES,
    Preset,
    has_presets,
    why_no_preset,
    with_loop_preset,
    with_preset,
)
from cloudai_mbridge.megatron_bridge.release import find_release, install_root, megatron_bridge_of, repo_path
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.recipes.apply import settings_of
from cloudai_mbridge.sweep.expand import SweepSpace, path_of

# The arguments that choose a recipe, and the arguments that choose a preset
STRUCTURAL = ("launcher", "model_recipe_name")
CHOOSING = (*PRESET_CHOOSING, "use_recipes", "num_gpus")


def preset_key(preset: Preset | None) -> tuple[Any, ...]:
    """Return a key that distinguishes the presets of one release."""
    return () if preset is None else (preset.name, preset.num_gpus)


# Keys of the launcher's configuration, in addition to its presets' fields, that change the meaning of an argument
_MORE_PLACES = {
    "dataset.seq_length": "seq_length",
    "dataset.sequence_length": "seq_length",
    "model.cuda_graph_modules": "cuda_graph_scope",
    "model.overlap_moe_expert_parallel_comm": "moe_a2a_overlap",
    "model.cpu_offloading": "activation_offload_layers",
}
_PLACES = {place: name for name, place in FIELDS.items()} | _MORE_PLACES
_OPTIONS = {place.rpartition(".")[2]: name for place, name in _PLACES.items()} | {"sl": "seq_length"}
# Arguments that decide together
_TOGETHER = (
    {"recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"},
    {"cuda_graph_impl", "cuda_graph_scope"},
)


def pinned_by(definition: TestDefinition, system: System | None = None, rules: RuleSet = RuleSet.RELEASE) -> Upstream:
    """Return the pins of a test. An installed clone determines its release, else the pinned commit does."""
    release = None
    if (repo := megatron_bridge_of(definition)) is not None:
        clone = repo_path(install_root(system), repo.url, repo.commit) if system and system.install_path else None
        release = find_release(repo.commit, clone)
    extra = definition.extra_cmd_args
    return Upstream(release, None, rules, overridden_by(extra), system, settings_of(extra))


def overridden_by(extra: Mapping[str, str]) -> frozenset[str]:
    """Return the arguments, and fields of the model, that keys or launcher options of `extra_cmd_args` decide."""
    names = set()
    for key in extra:
        if key.startswith("-"):
            option = key.lstrip("-").partition("=")[0]
            names.add(_OPTIONS.get(option, option))
        else:
            place = key.lstrip("+~")
            names.add(_PLACES.get(place, place.removeprefix("model.")))
    for group in _TOGETHER:
        if names & group:
            names |= group
    return frozenset(names)


_MOST_COMBINATIONS = 500
_MOST_NAMED = 5
_MOST_CAUSES = 3
_DECIDE_CONNECTIONS = ("tp", "cp", "moe_a2a_overlap")


def fill_in_notes(sweep: SweepSpace, pinned: Upstream) -> tuple[str, ...]:
    """Return notes on the presets that fill in missing values of a sweep's points, and on unknown values."""
    own_gpu = pinned.system.gpu_type if pinned.system else None
    sources: dict[str, list[str]] = {}
    unknown: dict[str, None] = {}
    gpus: dict[str, bool] = {}
    has_no_gpu = False
    for args in itertools.islice(_variants(sweep), _MOST_COMBINATIONS):
        preset = pinned.preset_of(args)
        if args.launcher is not Launcher.EMBEDDED:
            gpus[args.gpu_type] = "gpu_type" in args.model_fields_set or args.gpu_type == own_gpu
            if preset is None and with_preset(args, preset).unknown - set(sweep.grid.names):
                unknown[why_no_preset(args, pinned.release)] = None
        elif preset is None and pinned.system is not None and not pinned.system.is_one_machine:
            has_no_gpu |= has_presets(args.model_recipe_name) and not gpu_label(args, pinned.system)
        elif preset is not None:
            resolved = with_loop_preset(args, preset)
            filled = {name for name in resolved.from_preset if getattr(resolved.args, name) is not None}
            if filled <= set(sweep.grid.names):
                continue
        if preset is not None:
            names = sources.setdefault(f"Megatron-Bridge {preset.release.version} ({preset.release.source})", [])
            if preset.name not in names:
                names.append(preset.name)
    lines = []
    for source, names in sources.items():
        more = len(names) - _MOST_NAMED
        shown = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"defaults of {source}: {shown}")
    if has_no_gpu:
        lines.append("no preset fills in what is not set: the GPU is not named; set gpu_type in the system")
    if gpus and (overridden := sorted(pinned.overridden & set(UPSTREAM_DECIDES))):
        lines.append(f"extra_cmd_args set {', '.join(overridden)}; rules that need that are not evaluated")
    lines += _confounded(sweep, pinned)
    lines += _replaced_variables(sweep, pinned)
    lines += [
        f"the launcher is passed gpu_type = {gpu!r}, CloudAI's default, and the system has {own_gpu}; set it"
        for gpu, is_meant in gpus.items()
        if own_gpu and not is_meant
    ]
    nothing = "what Megatron-Bridge fills in is not known, and rules that need it are not evaluated"
    return (*lines, *(f"{nothing}: {why}" for why in itertools.islice(unknown, _MOST_NAMED)))


def because(causes: Mapping[tuple[str, str], int], rule: str, count: int) -> str:
    """Return what presets have to do with the points that a rule rejects, to follow their number; "" for nothing.

    causes: points by rule and cause. count: all points that the rule rejects.
    """
    found = sorted(((number, cause) for (name, cause), number in causes.items() if name == rule), reverse=True)
    texts = [f"{'' if number == count else f'for {number} '}because {cause}" for number, cause in found[:_MOST_CAUSES]]
    more = f" and {len(found) - _MOST_CAUSES} more causes" if len(found) > _MOST_CAUSES else ""
    return f", {', '.join(texts)}{more}" if texts else ""


def software_note(missing: str, count: int) -> str:
    """Return the note on accepted points whose software is not known."""
    return f"E14 not evaluated for {counted(count, 'point')}: {missing} is missing"


def lifted_note(lifted: Lifted, count: int) -> str:
    """Return the note on accepted points that break a rule."""
    return f"{lifted} ({counted(count, 'point')})"


_FORMAT = "compute_dtype"


def _confounded(sweep: SweepSpace, pinned: Upstream) -> list[str]:
    """Return a line if presets change other settings along an axis of number formats, which then are compared too."""
    if len(sweep.axes.get(_FORMAT, ())) < 2:
        return []
    found: dict[str, dict[str, dict[str, None]]] = {}
    for args in itertools.islice(_variants(sweep), _MOST_COMBINATIONS):
        preset, is_embedded = pinned.preset_of(args), args.launcher is Launcher.EMBEDDED
        resolved = (with_loop_preset if is_embedded else with_preset)(args, preset)
        for name in (ACTS_ON if is_embedded else UPSTREAM_DECIDES) if preset else ():
            if name not in sweep.axes:
                value = getattr(resolved.args, name)
                text = "unset" if value in (*UNSET, False) else as_toml(value)
                found.setdefault(name, {}).setdefault(text, {})[args.compute_dtype] = None
    differing = {name: values for name, values in found.items() if len(values) > 1}
    if not differing:
        return []
    texts = (
        f"{name} ({'; '.join(f'{value}: {chr(44).join(formats)}' for value, formats in values.items())})"
        for name, values in differing.items()
    )
    return [f"along {_FORMAT}, presets also change {', '.join(texts)}; set these to compare the formats alone"]


def _replaced_variables(sweep: SweepSpace, pinned: Upstream) -> list[str]:
    """Return a line for each variable of the system with another value than upstream's recipe sets."""
    theirs = pinned.system.global_env_vars if pinned.system else {}
    own = {path_of(name).removeprefix("extra_env_vars.") for name in sweep.axes} | sweep.env.keys()
    found: dict[str, dict[str, None]] = {}
    for args in itertools.islice(_variants(sweep, *_DECIDE_CONNECTIONS), _MOST_COMBINATIONS if theirs else 0):
        for name, value in _recipe_environment(args, pinned).items():
            if name in theirs and name not in own and str(theirs[name]) != value:
                found.setdefault(name, {})[value] = None
    return [
        f"global_env_vars.{name} = {str(theirs[name])!r} of the system replaces {' or '.join(values)}, which the"
        " recipe sets; remove it there, unless it is meant"
        for name, values in found.items()
    ]


def _recipe_environment(args: ResolvedCmdArgs, pinned: Upstream) -> dict[str, str]:
    """Return the environment variables that the recipe of a point sets, as far as available."""
    preset = pinned.preset_of(args)
    if args.launcher is Launcher.EMBEDDED:
        args = with_loop_preset(args, preset).args
        return recipe_environment(args, gpu_label(args, pinned.system), preset)
    if preset is None or "env_vars" not in preset.values:
        return {}
    env = recipe_environment(with_preset(args, preset).args, args.gpu_type.lower(), preset)
    if any(getattr(args, name) is not None for name in _DECIDE_CONNECTIONS):  # the launcher then decides by others
        env.pop(CONNECTIONS, None)
    return env


def _variants(sweep: SweepSpace, *more: str) -> Iterator[ResolvedCmdArgs]:
    """Yield the shared arguments with every combination of the axes that choose a preset, and of more arguments."""
    base = sweep.base_args()
    axes = {name: values for name, values in sweep.axes.items() if name in (*CHOOSING, *more)}
    for values in itertools.product(*axes.values()):
        yield base.model_copy(update=dict(zip(axes, values, strict=True)))
