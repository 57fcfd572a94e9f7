"""Run a point's script as a child process of this one."""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.local.child import Child
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan


@dataclass
class _Job:
    child: Child
    deadline: float | None
    ended_because: str = ""


class LocalClient:
    """Children of this process. A job's id is its process id."""

    def __init__(self, system: LocalSystem) -> None:
        self._system = system
        self._jobs: dict[str, _Job] = {}

    def preflight(self) -> None:
        """Check that the training packages are there."""
        if self._system.python_executable is None and (find_spec("torch") is None or find_spec("megatron") is None):
            raise ToolFailure(
                "torch and megatron-core are not installed here; install the train extra:"
                " pip install 'cloudai-mbridge[train]' -c constraints.txt"
            )

    def submit(self, plan: RunPlan, directory: Path) -> str:
        """Start the script; its output goes to files in the directory."""
        env = {**os.environ, PYTHON_VARIABLE: sys.executable, **plan.secret_env}
        child = Child(POINT_FILES.local_script, directory, env)
        deadline = None if plan.time_limit_s is None else time.monotonic() + plan.time_limit_s
        self._jobs[str(child.pid)] = _Job(child, deadline)
        return str(child.pid)

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Look at the children; end those that are over their time limit."""
        return {job_id: self._status(self._jobs[job_id]) for job_id in jobs}

    def _status(self, job: _Job) -> JobStatus:
        code = job.child.poll()
        if code is None:
            if job.deadline is not None and time.monotonic() > job.deadline:
                self._end(job, "TIMEOUT")
                return self._status(job)
            return JobStatus("RUNNING", JobClass.ACTIVE)
        job.child.kill_leftovers()  # ranks that outlived their torchrun would slow down the next point
        if job.ended_because:
            job_class = JobClass.CANCELLED if job.ended_because == "CANCELLED" else JobClass.FAILED
            return JobStatus(job.ended_because, job_class, signal=-code if code < 0 else None)
        if code == 0:
            return JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0)
        if code < 0:
            return JobStatus("FAILED", JobClass.FAILED, signal=-code)
        return JobStatus("FAILED", JobClass.FAILED, exit_code=code)

    def cancel(self, job_ids: Iterable[str]) -> None:
        """End the jobs: SIGTERM to the whole group, then SIGKILL."""
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None and job.child.poll() is None:
                self._end(job, "CANCELLED")

    def _end(self, job: _Job, because: str) -> None:
        job.ended_because = because
        job.child.end()
