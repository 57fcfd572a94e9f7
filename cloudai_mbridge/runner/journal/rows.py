"""The rows of a journal as values. A damaged row affects its own run only, and never makes it a success.

An ended attempt whose status cannot be read ended in a state that proves nothing. For an attempt that has not ended,
the scheduler is queried again, and an unreadable verdict is derived again from the run's files.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.errors import shown
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

# A run that a search did not need. It is not a verdict of the report, which leaves such runs out
UNTRIED = "untried"
VERDICTS = frozenset({"success", "failed", "skipped", "cancelled", UNTRIED})
_STATUS = TypeAdapter(JobStatus)
_REASONS = TypeAdapter(list[str])
_FIELDS = {each.name for each in fields(JobStatus)}
_JOB_ID = re.compile(r"[^-\s\0][^\s\0]{0,200}")  # not an option of scancel
_UNKNOWN_END = JobStatus("DAMAGED", JobClass.LOST, reason="the journal does not say how the job ended")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt:
    """One job of a run. status is None until the scheduler was asked.

    ending: what the attempt counts as once it has ended, if the runner ended it. failure: the id of what made it fail.
    """

    number: int
    token: str
    job_id: str | None
    status: JobStatus | None
    ending: JobStatus | None
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None  # "" if it has ended, and the time cannot be read
    failure: str


@dataclass(frozen=True)
class JournalEntry:
    """Rows of one run. verdict is None until the run has ended for good. note: why it was not tried again.

    damage: unreadable rows.
    """

    key: str
    verdict: str | None
    reasons: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    note: str = ""
    damage: tuple[str, ...] = ()

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def read_entry(row: Iterable[Any], attempts: Iterable[Iterable[Any]]) -> JournalEntry:
    """Return a run from its row and the rows of its attempts."""
    key, verdict, reasons, note = row
    reader = _RowReader()
    tried = tuple(map(reader.attempt, attempts))
    decided = reader.read("verdict", verdict, _to_verdict)
    why = reader.read("reasons", reasons, lambda text: _REASONS.validate_json(text, strict=True))
    return JournalEntry(key, decided, tuple(why or ()), tried, str(note), tuple(reader.damage))


class _RowReader:
    """Reads the rows of one run, and remembers unreadable rows."""

    def __init__(self) -> None:
        self.damage: list[str] = []

    def attempt(self, row: Iterable[Any]) -> Attempt:
        """Return an attempt: number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure."""
        number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure = row
        where = f"attempt {number}"
        if not isinstance(number, int) or not (isinstance(token, str) and token) or not isinstance(failure, str):
            self.damage.append(f"{where}: the row is not of an attempt")
            known = number if isinstance(number, int) else 0
            return Attempt(known, "", None, _UNKNOWN_END, None, None, None, ended_at="", failure="")
        read_status = self.read(f"{where}: status", status, _to_status)
        if read_status is None and ended_at is not None:
            read_status = _UNKNOWN_END
        return Attempt(
            number=number,
            token=token,
            job_id=self.read(f"{where}: job_id", job_id, _to_job_id),
            status=read_status,
            ending=self.read(f"{where}: ending", ending, _to_status),
            submitted_at=self.read(f"{where}: submitted_at", submitted_at, _to_time),
            started_at=self.read(f"{where}: started_at", started_at, _to_time),
            ended_at=None if ended_at is None else self.read(f"{where}: ended_at", ended_at, _to_time) or "",
            failure=failure,
        )

    def read(self, where: str, text: Any, convert: Callable[[str], _T]) -> _T | None:
        if text is None:
            return None
        try:
            if not isinstance(text, str):
                raise ValueError("not a text")
            return convert(text)
        except (ValueError, RecursionError, ValidationError) as error:
            said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            self.damage.append(f"{where}: {shown(text)}: {shown(said)}")
            return None


def _to_status(text: str) -> JobStatus:
    data = json.loads(text)
    if not isinstance(data, dict) or (unknown := sorted(set(data) - _FIELDS)):
        raise ValueError(f"unknown field {unknown[0]}" if isinstance(data, dict) else "not a table")
    status = _STATUS.validate_json(text, strict=True)
    if status.run_time_s is not None and not (math.isfinite(status.run_time_s) and status.run_time_s >= 0):
        raise ValueError("run_time_s is not a duration")
    return status


def _to_verdict(text: str) -> str:
    if text not in VERDICTS:
        raise ValueError("unknown verdict")
    return text


def _to_time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return text


def _to_job_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise ValueError("not a job id")
    return text
