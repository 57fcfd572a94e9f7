"""Time limits in the formats of Slurm and of CloudAI's scenarios."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

_FORM = re.compile(r"([0-9]+-[0-9]+(:[0-9]+){0,2}|[0-9]+(:[0-9]+){0,2})")
_SHORT = re.compile(r"([0-9]+)([smhdw])", re.IGNORECASE)
_LONGEST_MIN = 2**32 - 3  # Slurm counts minutes in 32 bits, and the two largest numbers mean something else
_HUGE = re.compile(r"[1-9][0-9]{15}")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_time_limit(text: str | None) -> float | None:
    """Return the seconds of minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None for no limit.

    Zero means no limit, as in sbatch(1).
    ValueError: the text has another form.
    """
    if text is None:
        return None
    if not _FORM.fullmatch(text):
        raise ValueError("is not a Slurm time limit; write minutes, HH:MM:SS or D-HH:MM:SS")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or None


def slurm_time(text: str) -> str | None:
    """Return a TOML's time limit in a format with the same meaning in Slurm; None for an empty text.

    As in CloudAI, 90s, 10m, 1h, 2d and 1w are durations and HH:MM is hours and minutes; Slurm reads it as MM:SS.
    ValueError: neither CloudAI nor Slurm reads the text, or it is longer than Slurm can count.
    """
    if not (text := text.strip()):
        return None
    if not _HUGE.search(text):
        limit = _slurm_time(text)
        if (parse_time_limit(limit) or 0) <= 60 * _LONGEST_MIN:
            return limit
    raise ValueError(f"is longer than Slurm can count ({_LONGEST_MIN} minutes); shorten it, or write 0 for none")


def _slurm_time(text: str) -> str | None:
    if short := _SHORT.fullmatch(text):
        return format_time_limit(int(short[1]) * _SECONDS[short[2].lower()])
    if re.fullmatch(r"[0-9]+:[0-9]+", text):
        hours, minutes = map(int, text.split(":"))
        return format_time_limit((hours * 60 + minutes) * 60)
    if not _FORM.fullmatch(text):
        raise ValueError(
            "is not a time limit; write HH:MM:SS, D-HH:MM:SS, minutes, or a duration such as 90s, 10m, 2h, 1d"
        )
    return text


def format_time_limit(seconds: float | None) -> str | None:
    """Format a limit as HH:MM:SS, or D-HH:MM:SS from a day on."""
    if seconds is None:
        return None
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


def _minutes(value: object) -> object:
    """Return a number of minutes as text, as in Slurm."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


SlurmTime = Annotated[
    str,
    BeforeValidator(_minutes),
    AfterValidator(slurm_time),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}),
]
