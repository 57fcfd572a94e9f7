"""Which of the jobs that Slurm lists are a run's. Pure, but for the claim that a job has left beside the run's files.

A job's name ends in the token of the attempt that it was submitted for. The ids that sbatch prints are never trusted:
an answer can be cut or wrong, and the job that bears the number be somebody else's.
"""

from collections.abc import Iterable, Mapping

from cloudai_mbridge.launch.claim import LOST_CLAIM, claimed_by
from cloudai_mbridge.launch.script import job_name
from cloudai_mbridge.schedulers.interface import Job, JobStatus
from cloudai_mbridge.schedulers.slurm.parsing import Listed


class Listing:
    """All jobs of one squeue, by token."""

    def __init__(self, rows: Mapping[str, Listed]) -> None:
        self._rows = rows
        self._of_token: dict[str, list[Listed]] = {}
        for row in rows.values():
            self._of_token.setdefault(row.name.rpartition(".")[2], []).append(row)

    def of(self, job: Job) -> list[Listed]:
        """Return the rows of a run: of its token, and of its place in the array; by id if it has no token.

        A row without an index may be the array itself, whose waiting tasks were all cancelled. Its name tells.
        """
        if not job.token:
            return [self._rows[job.job_id]] if job.job_id in self._rows else []
        name, task = f"{job_name(job.key)}.{job.token}", f"_{job.array_index}"
        rows = self._of_token.get(job.token, [])
        return [row for row in rows if (row.job_id.endswith(task) if "_" in row.job_id else row.name == name)]

    def has(self, token: str) -> bool:
        """Return whether any job of a token is listed."""
        return token in self._of_token


def that_counts(job: Job, rows: Iterable[Listed]) -> tuple[str, JobStatus | None]:
    """Return the id of the one job of a run that counts, and its status if it is among the rows.

    One job has claimed the attempt, or none has started yet. An id without a row is a guess.
    """
    by_id = {row.job_id: row for row in rows}
    asked = by_id.get(job.job_id)
    if asked is not None and len(by_id) == 1 and not asked.status.is_final:
        return job.job_id, asked.status  # of what still runs, its end will tell
    holder = claimed_by(job.directory, job.token) if job.token else None
    if holder is not None:
        return holder, by_id[holder].status if holder in by_id else None
    able = [row for row in by_id.values() if not has_lost(row.status)]
    able.sort(key=lambda row: (row.status.is_final, row.job_id != job.job_id))
    return (able[0].job_id, able[0].status) if able else (job.job_id, None)


def has_lost(status: JobStatus) -> bool:
    """Return whether a job has ended because another one has the claim."""
    return status.is_final and status.exit_code == LOST_CLAIM
