"""One scheduler of two: each run goes where its launcher belongs."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.schedulers.interface import Job, Scheduler, Seen, Submission
from cloudai_mbridge.schedulers.megatron_bridge import is_launcher


class ByLauncher:
    """The embedded loop's scheduler and the upstream launcher's, whose ids differ."""

    def __init__(self, embedded: Scheduler, upstream: Scheduler) -> None:
        self._embedded, self._upstream = embedded, upstream

    def _homes(self) -> tuple[Scheduler, Scheduler]:
        return self._embedded, self._upstream

    def _home(self, run: RunPlan) -> Scheduler:
        return self._embedded if run.upstream is None else self._upstream

    def _own(self, home: Scheduler, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if is_launcher(job.job_id) is (home is self._upstream)]

    def preflight(self) -> None:
        """Check both."""
        for home in self._homes():
            home.preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Ask each about its own."""
        return [
            batch for home in self._homes() for batch in home.batches([run for run in runs if self._home(run) is home])
        ]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Submit to the one that runs the plan's launcher."""
        return self._home(submission.runs[0]).submit(submission, root)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Ask each about its own."""
        found: dict[str, str] = {}
        every = list(submissions)
        for home in self._homes():
            if own := [submission for submission in every if self._home(submission.runs[0]) is home]:
                found |= home.find(own, root)
        return found

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Ask each for its own."""
        seen: dict[str, Seen] = {}
        for home in self._homes():
            if own := self._own(home, jobs):
                seen |= home.poll(own)
        return seen

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel each with its own."""
        every = list(jobs)
        for home in self._homes():
            if own := self._own(home, every):
                home.cancel(own)

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Both run on the same nodes."""
        return self._embedded.unhealthy_nodes(nodes)

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Both run on the same nodes."""
        return self._embedded.num_usable_nodes(exclude)
