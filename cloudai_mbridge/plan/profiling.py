"""Steps that a profiler slows: they are no measurements."""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

_SECTION = "profiling."
_START, _END, _PYTORCH, _NSYS = "profile_step_start", "profile_step_end", "use_pytorch_profiler", "use_nsys_profiler"
_WINDOW = {_START: 10, _END: 12}  # defaults of the configuration, here as in Megatron-Bridge
_FLAGS = {_START: 10, _END: 11}  # defaults of the launcher's flags, in effect with one of its profilers


def profiled_steps(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the first and the last step that a profiler slows, None without one. settings: the section `profiling`.

    The window [start, end) counts the steps done before a step. PyTorch's profiler warms up in the step before it. The
    step behind the window is slow as well: the trace is written in it.
    Source: megatron.bridge.training.profiling of Megatron-Bridge 0.6.0, and `training/profiling.py`.
    """
    start, end = (settings.get(name, default) for name, default in _WINDOW.items())
    uses_pytorch = settings.get("use_pytorch_profiler") is True
    if not (uses_pytorch or settings.get("use_nsys_profiler") is True):
        return None
    if not all(isinstance(number, int) for number in (start, end)) or end <= start:
        return None
    return max(1, start if uses_pytorch else start + 1), end + 1


def upstream_profiling(args: ResolvedCmdArgs, overrides: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the section `profiling` as far as the arguments and overrides for Megatron-Bridge's launcher set it."""
    found: dict[str, Any] = {_NSYS: bool(args.enable_nsys), _PYTORCH: bool(args.pytorch_profiler)}
    if any(found.values()):
        given = {_START: args.profiling_start_step, _END: args.profiling_stop_step}
        found |= {name: _FLAGS[name] if value is None else value for name, value in given.items()}
    for key, text in overrides.items():
        name = key.lstrip("+").removeprefix(_SECTION)
        if name in (_NSYS, _PYTORCH):
            found[name] = text.strip().lower() in ("true", "1")
        elif name in _WINDOW and text.strip().isdigit():
            found[name] = int(text)
    return found
