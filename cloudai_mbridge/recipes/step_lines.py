"""Overrides of either launcher that prevent a run's success, or change the steps behind its logged rates."""

from collections.abc import Callable, Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.recipes.apply import parse_value

# value, number of steps (None: the launcher decides) -> whether steps are missing from the log
_IsHiding = Callable[[Any, int | None], bool]


def _ends_early(interval: Any, num_steps: int | None) -> bool:
    """Return whether a training that exits after the first iteration divisible by `interval` exits early."""
    return _is_number(interval) and interval > 0 and num_steps is not None and interval < num_steps


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_on(value: Any, _: int | None) -> bool:
    return value not in (False, None, 0, [], "false", "False", "null", "None")


_NOT_PRINTED = "steps are measured by the lines that they print"
_HIDING: Mapping[str, tuple[_IsHiding, str]] = {
    "logger.log_interval": (lambda value, _: value != 1, f"prints no line for some steps, and {_NOT_PRINTED}"),
    "train.exit_interval": (_ends_early, "ends the training before max_steps"),
    "train.exit_duration_in_mins": (_is_on, "may end the training before max_steps; use a time limit instead"),
    "train.iterations_to_skip": (_is_on, f"leaves steps out, and {_NOT_PRINTED}"),
    "train.train_samples": (_is_on, "is a second length; cmd_args.max_steps is the first"),
    "train.skip_train": (_is_on, "trains no step"),
    "validation.skip_train": (_is_on, "trains no step"),
}
_RESIZING = ("train.rampup_batch_size", "train.step_batch_size_schedule")
# The embedded loop writes its records anyway
_HIDING_UPSTREAM: Mapping[str, tuple[_IsHiding, str]] = {
    "logger.skip_train_metrics_log": (_is_on, f"prints no line for any step, and {_NOT_PRINTED}")
}


def refuse_hidden_steps(extra: Mapping[str, str], num_steps: int | None, *, is_upstream: bool) -> None:
    """Raise BadInput for `extra_cmd_args` that keep steps out of the log, or vary the size of its steps.

    num_steps: None if the launcher decides.
    """
    table = {**_HIDING, **_HIDING_UPSTREAM} if is_upstream else _HIDING
    for key, text in extra.items():
        is_hiding, why = table.get(key.lstrip("+"), (None, ""))
        if is_hiding is not None and is_hiding(parse_value(text), num_steps):
            raise BadInput(f"extra_cmd_args: {key!r} = {text} {why}: such a run fails; remove it")
        if key.lstrip("+") in _RESIZING and _is_on(parse_value(text), num_steps):
            raise BadInput(
                f"extra_cmd_args: {key!r} = {text} varies the batch size, and rates are of cmd_args.gb; remove it"
            )
