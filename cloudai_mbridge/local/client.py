"""Run a point's script as a child process, and leave none of its processes behind.

torchrun starts every rank in a session of its own, so neither the script's process group nor its session reaches them.
All of them inherit a variable that is unique to the job, and are found by it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus, SubmitRefused
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan

_KILL_WAIT_S = 10.0
_KILL_ROUNDS = 10
_MARK_VARIABLE = "MBRIDGE_LOCAL_JOB"


@dataclass
class _Job:
    process: subprocess.Popen[bytes]
    mark: str
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
        mark = uuid.uuid4().hex
        env = {**os.environ, PYTHON_VARIABLE: sys.executable, _MARK_VARIABLE: mark, **plan.secret_env}
        try:
            with (directory / POINT_FILES.stdout).open("ab") as out, (directory / POINT_FILES.stderr).open("ab") as err:
                process = subprocess.Popen(
                    ["bash", POINT_FILES.local_script],
                    cwd=directory,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            raise SubmitRefused(f"bash cannot be started: {error}") from None
        deadline = None if plan.time_limit_s is None else time.monotonic() + plan.time_limit_s
        self._jobs[str(process.pid)] = _Job(process, mark, deadline)
        return str(process.pid)

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Look at the children; end those that are over their time limit."""
        return {job_id: self._status(self._jobs[job_id]) for job_id in jobs}

    def _status(self, job: _Job) -> JobStatus:
        code = job.process.poll()
        if code is None:
            if job.deadline is not None and time.monotonic() > job.deadline:
                self._end(job, "TIMEOUT")
                return self._status(job)
            return JobStatus("RUNNING", JobClass.ACTIVE)
        _kill_leftovers(job.mark)  # ranks that outlived their torchrun would slow down the next point
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
            if (job := self._jobs.get(job_id)) is not None and job.process.poll() is None:
                self._end(job, "CANCELLED")

    def _end(self, job: _Job, because: str) -> None:
        job.ended_because = because
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(_KILL_WAIT_S)
        _kill_leftovers(job.mark)
        job.process.wait()


def _kill_leftovers(mark: str) -> None:
    """Kill every process that carries the mark, and look again: one may have been starting another.

    One that does not die, in an uninterruptible call of a driver, is not waited for without end.
    """
    for _ in range(_KILL_ROUNDS):
        found = [process for process in psutil.process_iter() if _has_mark(process, mark)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        is_alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(is_alive and process.environ().get(_MARK_VARIABLE) == mark)
    except (psutil.Error, OSError):
        return False
