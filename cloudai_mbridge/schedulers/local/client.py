"""Run a point's script as a process on this machine. It outlives mbridge, and a later mbridge takes it up again."""

import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.job_ids import ProcessId, process_of
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.local.child import Child, find_marked
from cloudai_mbridge.training.compat.versions import why_unusable
from cloudai_mbridge.training.warm_start import WARM_START_VARIABLE


@dataclass
class _Process:
    child: Child
    started: float  # on the monotonic clock: the wall clock can be set
    time_limit_s: float | None
    ended_because: str = ""

    def end(self, because: str) -> None:
        self.ended_because = because
        self.child.end()


class LocalClient:
    """Scripts on this machine. A job's id is its process id and the submission's token."""

    pace, may_be_late = (0.1, 1.0, 0.02), False  # polling processes costs a few milliseconds

    def __init__(self, system: LocalSystem, runs: Iterable[RunPlan] = ()) -> None:
        """runs: may include runs that an earlier process started."""
        self._system = system
        self._time_limits = {run.key: run.time_limit_s for run in runs}
        self._processes: dict[str, _Process] = {}
        self._warm_start = {WARM_START_VARIABLE: f"{os.getpid()}.{secrets.token_hex(16)}"} if system.warm_start else {}

    def preflight(self) -> None:
        """Check that the training packages are there, in a version that the loop was tested with."""
        if self._system.python_executable is not None:
            return
        if reason := why_unusable():
            raise ToolFailure(reason)
        if find_spec("torch") is None or find_spec("megatron") is None:
            raise ToolFailure(
                "torch and megatron-core are not installed here; install the train extra:"
                " pip install 'cloudai-mbridge[train]' -c constraints.txt"
            )

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Start every run alone."""
        return [(run,) for run in runs]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start the script; its output goes to files in its directory."""
        (run,) = submission.runs
        warm_start = {} if run.profiler else self._warm_start  # a profiler follows what the job starts, not a server
        env = {**os.environ, PYTHON_VARIABLE: sys.executable, **run.secret_env, **warm_start}
        child = Child.start(submission.token, POINT_FILES.local_script, root / run.key, env)
        job_id = str(child.id)
        self._processes[job_id] = _Process(child, time.monotonic(), run.time_limit_s)
        return {run.key: job_id}

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Look for processes that carry the tokens, and for the files of ended processes."""
        found = {}
        for submission in submissions:
            (run,) = submission.runs
            if pid := find_marked(submission.token):
                found[run.key] = str(ProcessId(pid, submission.token))
            elif job_id := _started(root / run.key, submission.token):
                found[run.key] = job_id
        return found

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Poll the processes; end processes over their time limit."""
        return {job.key: Seen(job.job_id, self._status(self._process(job))) for job in jobs}

    def _process(self, job: Job) -> _Process:
        """Return a job's process, including a process of an earlier mbridge."""
        if job.job_id not in self._processes:
            child = Child.of(job.job_id, job.directory)
            started = time.monotonic() - (child.age_s() or _written_run_time_s(job.directory))
            self._processes[job.job_id] = _Process(child, started, self._time_limits.get(job.key))
        return self._processes[job.job_id]

    def _status(self, job: _Process) -> JobStatus:
        code = job.child.poll()
        run_time_s = time.monotonic() - job.started
        if code is None:
            if job.time_limit_s is not None and run_time_s > job.time_limit_s:
                job.end("TIMEOUT")
                return self._status(job)
            return JobStatus("RUNNING", JobClass.ACTIVE, run_time_s=run_time_s)
        job.child.kill_leftovers()  # ranks that outlived their torchrun would slow down the next point
        return _ended(code, job.ended_because, run_time_s)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End the jobs: SIGTERM to the whole group, then SIGKILL."""
        for job in jobs:
            process = self._process(job)
            if process.child.poll() is None:
                process.end("CANCELLED")

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Return no nodes: this machine is in service."""
        return {}

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Return the number of nodes: 1, or 0 if any is excluded."""
        return 0 if list(exclude) else 1

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        """Return False: no job of this machine waits."""
        return False

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        """Return "": this machine has no limits."""
        return ""


def _ended(code: int, because: str, run_time_s: float) -> JobStatus:
    state = because or ("FAILED" if code else "COMPLETED")
    classes = {"COMPLETED": JobClass.SUCCEEDED, "CANCELLED": JobClass.CANCELLED}
    exit_code = None if because or code < 0 else code
    signal = -code if code < 0 else None
    return JobStatus(state, classes.get(state, JobClass.FAILED), exit_code, signal, run_time_s=run_time_s)


def _written_run_time_s(directory: Path) -> float:
    """Return the time between a script's first and last line about itself; one clock, the file server's, dates both."""
    try:
        started, ended = ((directory / name).stat().st_mtime for name in (POINT_FILES.started, POINT_FILES.exit_code))
    except OSError:
        return 0.0
    return max(0.0, ended - started)


def _started(directory: Path, token: str) -> str | None:
    """Return the job id that a script of this token has written."""
    try:
        lines = read_regular(directory / POINT_FILES.started).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotRegular):
        return None
    ids = [line.partition("job=")[2].split(" ")[0] for line in lines]
    return next((job_id for job_id in reversed(ids) if (own := process_of(job_id)) and own.mark == token), None)
