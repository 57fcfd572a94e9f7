"""Presets of the embedded loop: values for the arguments that the loop uses.

The newest known release's presets, joined with a test's settings as its launcher does, with one difference: the test
always wins, even if upstream's launcher would keep the preset (`use_megatron_fsdp = false`), and "" unsets an argument.
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.megatron_bridge.presets.find import LISTS, UPSTREAM_DECIDES, Resolved
from cloudai_mbridge.megatron_bridge.presets.resolve import Preset, resolve_sizes
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs, names_in

# Arguments with a field in the loop's configuration
ACTS_ON = tuple(name for name in UPSTREAM_DECIDES if ARGUMENTS[name].config)


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
