"""The log lines that are understood: our records, and the two lines of Megatron-Bridge."""

import json
import re
from typing import Any

from cloudai_mbridge.training.process.log_lines import RUN_MARK, STEP_MARK

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
# Two expressions: one that spans what is between them takes quadratic time on a long line
_STEP_TIME = re.compile(rf"Step Time\s*:\s*{_NUMBER}\s*s", re.IGNORECASE)
_UTILIZATION = re.compile(rf"GPU utilization:\s*{_NUMBER}\s*(?:MODEL_)?TFLOP/s/GPU", re.IGNORECASE)
_DEEPEST = 20
# What srun --label and torchrun write before a rank's line, and the NULs of a file that was cut while it was written
_LABELS = r"(?:\x00+|\d{1,6}: |\[[\w-]{1,40}\]: ?){0,4}"
_ITERATION = re.compile(r"\biteration\s+([0-9]{1,15})/\s*([0-9]{1,15})\s*\|(.*)")


def match_step_time(line: str) -> tuple[float, float] | None:
    """Return (step time in s, TFLOP/s/GPU) of a "Step Time" line; a prefix such as a rank is allowed."""
    time = _STEP_TIME.search(line)
    rate = _UTILIZATION.search(line, time.end()) if time else None
    return (float(time[1]), float(rate[1])) if time and rate else None


def match_iteration(line: str) -> dict[str, Any] | None:
    """Return the fields of an "iteration N/ M |" line. A loss that is NaN or negative is not printed there."""
    match = _ITERATION.search(line)
    if not match:
        return None
    fields = {}
    for part in match[3].split("|"):
        name, _, value = part.partition(":")
        fields[name.strip()] = value.strip()
    return {
        "step": int(match[1]),
        "train_iters": int(match[2]),
        "loss": _number(fields.get("lm loss", fields.get("loss"))),
        "grad_norm": _number(fields.get("grad norm")),
        "nan_iterations": _number(fields.get("number of nan iterations")) or 0,
    }


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def match_record(line: str, mark: str) -> dict[str, Any] | None:
    """Return the JSON object behind `mark`, which begins the line but for a rank's label, or None.

    One that is cut in half or nested deeper than 20 is not a record.
    """
    if not (start := re.match(rf"{_LABELS}{mark} {{", line)):
        return None
    text = line[start.end() :]
    try:
        record = json.loads("{" + text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or (_may_be_deep(text) and _is_deep(record)):
        return None
    return record


def _may_be_deep(text: str) -> bool:
    return text.count("[") + text.count("{") >= _DEEPEST


def _is_deep(value: Any) -> bool:
    """Return whether tables and lists are nested deeper than 20 levels, which no record of ours is."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        tables = [each for each in level if isinstance(each, dict | list)]
        if not tables:
            return False
        level = [item for each in tables for item in (each.values() if isinstance(each, dict) else each)]
    return True


def has_record(line: str) -> bool:
    """Return whether a record stands on the line, whole or damaged, wherever it begins."""
    return f"{STEP_MARK} {{" in line or f"{RUN_MARK} {{" in line


def match_step_record(line: str) -> dict[str, Any] | None:
    return match_record(line, STEP_MARK)


def match_run_record(line: str) -> dict[str, Any] | None:
    return match_record(line, RUN_MARK)
