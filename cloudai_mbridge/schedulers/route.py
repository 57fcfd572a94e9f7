"""Routing between two schedulers: each run goes to its launcher's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cloudai_mbridge.launch.job_ids import process_of
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.schedulers.interface import Job, JobStatus, Scheduler, Seen, Submission

_T = TypeVar("_T")


class ByLauncher:
    """The embedded loop's scheduler and the upstream launcher's, whose ids differ."""

    def __init__(self, embedded: Scheduler, upstream: Scheduler) -> None:
        self._embedded, self._upstream = embedded, upstream

    def _split(self, items: Iterable[_T], is_upstream: Callable[[_T], bool]) -> Iterator[tuple[Scheduler, list[_T]]]:
        """Yield each scheduler with its own items, if it has any."""
        every = list(items)
        for scheduler in (self._embedded, self._upstream):
            if own := [item for item in every if is_upstream(item) is (scheduler is self._upstream)]:
                yield scheduler, own

    def preflight(self) -> None:
        self._embedded.preflight()
        self._upstream.preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        parts = self._split(runs, lambda run: run.upstream is not None)
        return [batch for scheduler, own in parts for batch in scheduler.batches(own)]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        return self._of(submission.runs[0]).submit(submission, root)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        parts = self._split(submissions, _has_upstream)
        return {key: job_id for scheduler, own in parts for key, job_id in scheduler.find(own, root).items()}

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        parts = self._split(jobs, _is_launcher_job)
        return {key: seen for scheduler, own in parts for key, seen in scheduler.poll(own).items()}

    def cancel(self, jobs: Iterable[Job]) -> None:
        for scheduler, own in self._split(jobs, _is_launcher_job):
            scheduler.cancel(own)

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        return self._embedded.unhealthy_nodes(nodes)  # both run on the same nodes

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        return self._embedded.num_usable_nodes(exclude)

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        return self._of(run).may_start(run, status)

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        return self._of(run).exceeded(run, status)

    def _of(self, run: RunPlan) -> Scheduler:
        return self._embedded if run.upstream is None else self._upstream


def _has_upstream(submission: Submission) -> bool:
    return submission.runs[0].upstream is not None


def _is_launcher_job(job: Job) -> bool:
    process = process_of(job.job_id)
    return process is not None and process.is_launcher
