"""One scheduler of two: each run goes where its launcher belongs."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from cloudai_mbridge.jobs import JobStatus, Scheduler
from cloudai_mbridge.plan import RunPlan


class ByLauncher:
    """The embedded loop's scheduler and the upstream launcher's, whose ids differ."""

    def __init__(self, embedded: Scheduler, upstream: Scheduler) -> None:
        self._embedded, self._upstream = embedded, upstream
        self._home: dict[str, Scheduler] = {}

    def preflight(self) -> None:
        """Check both."""
        self._embedded.preflight()
        self._upstream.preflight()

    def submit(self, plan: RunPlan, directory: Path) -> str:
        """Submit to the one that runs the plan's launcher."""
        home = self._embedded if plan.upstream is None else self._upstream
        job_id = home.submit(plan, directory)
        self._home[job_id] = home
        return job_id

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Ask each for its own."""
        return {
            job_id: status
            for home in (self._embedded, self._upstream)
            if (own := {job_id: path for job_id, path in jobs.items() if self._home[job_id] is home})
            for job_id, status in home.poll(own).items()
        }

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Cancel each with its own."""
        ids = list(job_ids)
        for home in (self._embedded, self._upstream):
            if own := [job_id for job_id in ids if self._home.get(job_id) is home]:
                home.cancel(own)
