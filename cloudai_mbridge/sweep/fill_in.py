"""Notes in plans on the values that Megatron-Bridge's launcher fills in, and on rules that its release has lifted."""

import itertools
from collections.abc import Iterator

from cloudai_mbridge.constraints import Lifted
from cloudai_mbridge.errors import counted
from cloudai_mbridge.megatron_bridge.environment import CONNECTIONS, gpu_label, recipe_environment
from cloudai_mbridge.megatron_bridge.presets import (
    UPSTREAM_DECIDES,
    Preset,
    why_no_preset,
    with_loop_preset,
    with_preset,
)
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import CHOOSING, Pinned

_MOST_COMBINATIONS = 500
_MOST_NAMED = 5
_DECIDE_CONNECTIONS = ("tp", "cp", "moe_a2a_overlap")


def fill_in_notes(sweep: SweepSpace, pinned: Pinned) -> tuple[str, ...]:
    """Return notes on the presets that fill in missing values of a sweep's points, and on unknown values."""
    sources: dict[str, list[str]] = {}
    unknown: dict[str, None] = {}
    gpus: dict[str, bool] = {}
    for args in itertools.islice(_variants(sweep), _MOST_COMBINATIONS):
        preset = pinned.preset(args)
        if args.launcher is not Launcher.EMBEDDED:
            gpus[args.gpu_type] = "gpu_type" in args.model_fields_set or args.gpu_type == pinned.gpu_type
            if preset is None and with_preset(args, preset).unknown - set(sweep.grid.names):
                unknown[why_no_preset(args, pinned.release)] = None
        elif preset is not None and not _is_open(args, preset, sweep):
            continue
        if preset is not None:
            names = sources.setdefault(f"Megatron-Bridge {preset.release.version} ({preset.release.source})", [])
            if preset.name not in names:
                names.append(preset.name)
    lines = [f"defaults of {source}: {_few(names)}" for source, names in sources.items()]
    if gpus and (overridden := sorted(pinned.overridden & set(UPSTREAM_DECIDES))):
        lines.append(f"extra_cmd_args set {', '.join(overridden)}; rules that need that are not evaluated")
    lines += _replaced_variables(sweep, pinned)
    lines += [
        f"the launcher is passed gpu_type = {gpu!r}, CloudAI's default, and the system has {pinned.gpu_type}; set it"
        for gpu, is_meant in gpus.items()
        if pinned.gpu_type and not is_meant
    ]
    nothing = "what Megatron-Bridge fills in is not known, and rules that need it are not evaluated"
    return (*lines, *(f"{nothing}: {why}" for why in itertools.islice(unknown, _MOST_NAMED)))


def _is_open(args: ResolvedCmdArgs, preset: Preset, sweep: SweepSpace) -> bool:
    """Return whether a preset fills in something of a point of the embedded loop."""
    resolved = with_loop_preset(args, preset)
    filled = {name for name in resolved.from_preset if getattr(resolved.args, name) is not None}
    return bool(filled - set(sweep.grid.names))


def lifted_note(lifted: Lifted, count: int) -> str:
    """Return the note on accepted points that break a rule."""
    return f"{lifted} ({counted(count, 'point')})"


def _replaced_variables(sweep: SweepSpace, pinned: Pinned) -> list[str]:
    """Return a line for each variable of the system with another value than upstream's recipe sets."""
    theirs = pinned.system.global_env_vars if pinned.system else {}
    own = {axis.path.removeprefix("extra_env_vars.") for axis in sweep.axes} | sweep.env.keys()
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


def _recipe_environment(args: ResolvedCmdArgs, pinned: Pinned) -> dict[str, str]:
    """Return the environment variables that the recipe of a point sets, as far as available."""
    preset = pinned.preset(args)
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
    axes = {axis.name: axis.values for axis in sweep.axes if axis.name in (*CHOOSING, *more)}
    for values in itertools.product(*axes.values()):
        yield base.model_copy(update=dict(zip(axes, values, strict=True)))


def _few(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
