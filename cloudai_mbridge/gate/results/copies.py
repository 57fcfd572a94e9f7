"""Runs that are copies of others: step times that no two runs can have in common."""

import math

from cloudai_mbridge.gate.results.read import RunResult

_MANY_TIMES, _MANY_VALUES = 10, 5
_AGREEMENT = 1e-6


class Originals:
    """Runs among which copies are searched for; a search takes as long however many there are."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int | None], list[RunResult]] = {}

    def add(self, run: RunResult) -> None:
        self._runs.setdefault((run.point, _bucket(run)), []).append(run)

    def of(self, run: RunResult) -> RunResult | None:
        """Return the run of the same point that a run is a copy of, if any."""
        place = _bucket(run)
        near = (None,) if place is None else (place - 1, place, place + 1)
        others = (other for bucket in near for other in self._runs.get((run.point, bucket), ()))
        return next((other for other in others if _is_copy(run, other)), None)


def _bucket(run: RunResult) -> int | None:
    """Return a number that differs by at most one between runs whose first step times agree."""
    first = run.steps[0].step_time_s if run.steps else None
    return math.floor(math.log(first) / (2 * _AGREEMENT)) if first and 0 < first < math.inf else None


def _is_copy(run: RunResult, other: RunResult) -> bool:
    """Return whether all step times agree to a millionth.

    That says nothing of a few times that are rounded, as those of Megatron-Bridge's lines are.
    """
    if len(run.steps) != len(other.steps):
        return False
    pairs = zip(run.steps, other.steps, strict=True)
    return all(_agree(one.step_time_s, two.step_time_s) for one, two in pairs) and _tells_runs_apart(run)


def _agree(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=_AGREEMENT)


def _tells_runs_apart(run: RunResult) -> bool:
    """Return whether there are many different step times, or two at least at full precision."""
    times = [step.step_time_s for step in run.steps if step.step_time_s is not None]
    is_exact = len(run.steps) > 1 and any(not _agree(round(time, 3), time) for time in times if math.isfinite(time))
    is_long = len(run.steps) >= _MANY_TIMES and len({f"{time:.6g}" for time in times}) >= _MANY_VALUES
    return is_exact or is_long
