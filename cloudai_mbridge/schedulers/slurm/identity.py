"""Ownership of jobs: by the token in the name, by id and directory, or by the files of the job's script."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.claim import LOST_CLAIM, SIXTEEN_HEX, claimed_by
from cloudai_mbridge.launch.script import slug
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.schedulers.interface import Job, JobStatus
from cloudai_mbridge.schedulers.slurm.parsing import Listed, parse_started

_TOKEN = re.compile(rf"\.{SIXTEEN_HEX}")  # a site's own name may be a hash


class Listing:
    """All jobs of one squeue, by token.

    A job's name holds the token of the attempt that it was submitted for, whatever a site's plug-in writes around it.
    A name without one is proven by two facts together: the id that sbatch printed, and the run's directory. The id
    alone is never trusted: an answer can be cut or wrong, and the job that bears the number be another user's.
    """

    def __init__(self, rows: Mapping[str, Listed]) -> None:
        self._rows = rows
        self._named: dict[str, list[Listed]] = {}

    def of(self, job: Job) -> list[Listed]:
        """Return the rows of a run: by its token and its place in the array; by id if it has no token.

        A row without an index may be the array itself, whose waiting tasks were all cancelled. Its name decides.
        """
        asked = self._rows.get(job.job_id)
        if not job.token:
            return [asked] if asked is not None else []
        found = [row for row in self._with(job.token) if _is_run_of(row, job)]
        if asked is not None and asked not in found and _is_placed_as(asked, job):
            found.append(asked)
        return found

    def has(self, token: str) -> bool:
        """Return whether any job of a token is listed."""
        return bool(self._with(token))

    def _with(self, token: str) -> list[Listed]:
        if token not in self._named:
            self._named[token] = [row for row in self._rows.values() if token in row.name]
        return self._named[token]


def _is_run_of(row: Listed, job: Job) -> bool:
    """Return whether a row with a job's token is of its run."""
    _, is_task, place = row.job_id.rpartition("_")
    if is_task:
        return place == str(job.array_index)
    return f"{slug(job.key)}.{job.token}" in row.name or row.job_id in (job.job_id, started_as(job))


def _is_placed_as(row: Listed, job: Job) -> bool:
    """Return whether a row whose name was replaced starts in the directory of a job's run, or in the root above it."""
    return not _TOKEN.search(row.name) and Path(row.directory) in (job.directory, *job.directory.parents[: _depth(job)])


def _depth(job: Job) -> int:
    return len(Path(job.key).parts)


def that_counts(job: Job, rows: Iterable[Listed]) -> tuple[str, JobStatus | None]:
    """Return the id of the one job of a run that counts, and its status if it is among the rows.

    One job has claimed the attempt, or none has started yet. An id without a row is a guess.
    """
    by_id = {row.job_id: row for row in rows}
    asked = by_id.get(job.job_id)
    if asked is not None and len(by_id) == 1 and not asked.status.is_final:
        return job.job_id, asked.status  # still running: a later poll decides
    holder = claimed_by(job.directory, job.token) if job.token else None
    if holder is not None:
        return holder, by_id[holder].status if holder in by_id else None
    able = [row for row in by_id.values() if not has_lost(row.status)]
    able.sort(key=lambda row: (row.status.is_final, row.job_id != job.job_id))
    return (able[0].job_id, able[0].status) if able else (job.job_id, None)


def has_lost(status: JobStatus) -> bool:
    """Return whether a job has ended because another one has the claim."""
    return status.is_final and status.exit_code == LOST_CLAIM


def is_accounted(row: Listed, job: Job, same_id: Sequence[Listed]) -> bool:
    """Return whether a row of the accounting is a job's: by its name, or by the files of its script."""
    if _carries(row.name, job.token):
        return True
    is_alone = len(same_id) == 1 and not _TOKEN.search(row.name)
    return is_alone and claimed_by(job.directory, job.token) == job.job_id


def is_of(started: Mapping[str, str], job: Job) -> bool:
    """Return whether the start file of a job's script was written by this job."""
    return started.get("job") == job.job_id and _began_for(started, job.token)


def _began_for(started: Mapping[str, str], token: str) -> bool:
    return started.get("token") == token or _carries(started.get("name", ""), token)


def _carries(name: str, token: str) -> bool:
    """Return whether a job of this name was submitted with a token."""
    return token in name


def started_as(job: Job) -> str:
    """Return the id of the job that has started under a token, "" if none has."""
    started = read_started(job.directory)
    return started["job"] if job.token and _began_for(started, job.token) and "job" in started else ""


def read_started(directory: Path) -> dict[str, str]:
    """Return the content of the file that a job's script writes when it starts; {} if it has not started."""
    return parse_started(read_text(directory / POINT_FILES.started) or "")


def read_text(path: Path) -> str | None:
    """Return a file's text, None if it is missing or not a regular file."""
    try:
        return read_regular(path).decode(errors="replace")
    except (FileNotFoundError, NotRegular):
        return None
