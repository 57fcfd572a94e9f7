"""Which runs of a report the history takes, and as what: what would not count in a gate goes in as failed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.json_text import is_deep
from cloudai_mbridge.gate.compare.groups import why_not
from cloudai_mbridge.gate.results.model import comparability_id
from cloudai_mbridge.gate.results.read import SUCCESS, RunResult

FAILED = "failed"
_FINAL = (SUCCESS, FAILED)
_SLACK = timedelta(days=1)  # of clocks and zones
_LARGEST = 2**63 - 1  # what SQLite has


class Taken(NamedTuple):
    """A run that is taken. ended_at: UTC, such that text sorts as time does."""

    run: RunResult
    ended_at: str


@dataclass(frozen=True)
class Intake:
    """What is taken of a report. left_out: why -> how many. held: (run id, point) of all its runs."""

    taken: tuple[Taken, ...]
    left_out: Counter[str]
    held: tuple[tuple[str, str], ...]
    scenario: str | None
    system: str | None


def take_runs(runs: Iterable[RunResult], path: str, now: datetime) -> Intake:
    """Sort the runs of a report. now: UTC.

    Raises:
        BadInput: a time that is none, a number that is too large, or a table that is nested too deep.
    """
    runs, taken, left_out = list(runs), [], Counter[str]()
    for run in runs:
        if why := _left_out(run):
            left_out[why] += 1
            continue
        ended_at = _utc(run, path)
        if ended_at > now + _SLACK:
            left_out["that ended more than a day in the future"] += 1
            continue
        taken.append(Taken(_as_stored(run, path), ended_at.isoformat(timespec="milliseconds")))
    scenario, system = (runs[0].scenario, runs[0].system) if runs else (None, None)
    return Intake(tuple(taken), left_out, tuple((run.run_id, run.point) for run in runs), scenario, system)


def _left_out(run: RunResult) -> str:
    if run.verdict not in _FINAL:
        return run.verdict
    if not run.comparability_id and not run.comparability:
        return "without a comparability key"
    if comparability_id(run.comparability) != run.comparability_id:
        return "whose comparability id is not the digest of its fields"
    return ""


def _as_stored(run: RunResult, path: str) -> RunResult:
    """Return the run, as failed if it would not count in a gate."""
    for name, number in (("num_steps", run.num_steps or 0), ("warmup_steps", run.warmup_steps)):
        if abs(number) > _LARGEST:
            raise BadInput(f"{path}: {run.point}: {name} has more than 64 bits; write the report again")
    for name, table in (("environment", run.environment), ("comparability", run.comparability)):
        if is_deep(dict(table)):
            raise BadInput(f"{path}: {run.point}: {name} is nested too deep; write the report again")
    why = why_not(run) if run.is_success else ""
    return replace(run, verdict=FAILED, reasons=(*run.reasons, why)) if why else run


def _utc(run: RunResult, path: str) -> datetime:
    """Return when a run ended. A time without a zone is UTC."""
    try:
        time = datetime.fromisoformat(run.ended_at)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadInput(
            f"{path}: {run.point}: ended_at: {run.ended_at!r} is not an ISO 8601 time; write the report again"
        ) from None
