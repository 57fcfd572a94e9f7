"""Routing between schedulers: each run goes to the scheduler of its launcher."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from cloudai_mbridge.launch.job_ids import process_of
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.launchers import EMBEDDED, MEGATRON_BRIDGE, RunLauncher
from cloudai_mbridge.schedulers.interface import Job, JobStatus, Scheduler, Seen, Submission

_T = TypeVar("_T")


class ByLauncher:
    """The embedded loop's scheduler and the upstream launcher's, whose ids differ."""

    def __init__(self, embedded: Scheduler, upstream: Scheduler) -> None:
        self._embedded = embedded
        self._schedulers: Mapping[RunLauncher, Scheduler] = {EMBEDDED: embedded, MEGATRON_BRIDGE: upstream}

    def _split(self, items: Iterable[_T], of: Callable[[_T], RunLauncher]) -> Iterator[tuple[Scheduler, list[_T]]]:
        """Yield each scheduler with its own items, if it has any. of: the launcher of an item."""
        every = list(items)
        for launcher, scheduler in self._schedulers.items():
            if own := [item for item in every if of(item) is launcher]:
                yield scheduler, own

    @property
    def pace(self) -> tuple[float, float, float]:
        return self._embedded.pace

    @property
    def may_be_late(self) -> bool:
        return self._embedded.may_be_late

    def preflight(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        parts = self._split(runs, lambda run: run.launcher)
        return [batch for scheduler, own in parts for batch in scheduler.batches(own)]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        return self._of(submission.runs[0]).submit(submission, root)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        parts = self._split(submissions, lambda submission: submission.runs[0].launcher)
        return {key: job_id for scheduler, own in parts for key, job_id in scheduler.find(own, root).items()}

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        parts = self._split(jobs, _launcher_of_job)
        return {key: seen for scheduler, own in parts for key, seen in scheduler.poll(own).items()}

    def cancel(self, jobs: Iterable[Job]) -> None:
        for scheduler, own in self._split(jobs, _launcher_of_job):
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
        return self._schedulers[run.launcher]


def _launcher_of_job(job: Job) -> RunLauncher:
    process = process_of(job.job_id)
    return MEGATRON_BRIDGE if process is not None and process.is_launcher else EMBEDDED
