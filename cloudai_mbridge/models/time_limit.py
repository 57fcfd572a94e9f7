"""Slurm's notation of a time limit."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator

_FORM = re.compile(r"([0-9]+-[0-9]+(:[0-9]+){0,2}|[0-9]+(:[0-9]+){0,2})")


def parse_time_limit(text: str | None) -> float | None:
    """Return the seconds of minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None for no limit.

    A limit of zero is none, as sbatch(1) has it.

    Raises:
        ValueError: the text has another form.
    """
    if text is None:
        return None
    if not _FORM.fullmatch(text):
        raise ValueError("is no Slurm time limit; write minutes, HH:MM:SS or D-HH:MM:SS")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or None


def _check(value: Any) -> Any:
    for text in value if isinstance(value, list) else [value]:
        parse_time_limit(text)
    return value


SlurmTime = Annotated[str, AfterValidator(_check)]
