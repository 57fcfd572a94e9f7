"""Run a point's script as a process on this machine. It outlives mbridge, and a later mbridge takes it up again.

torchrun starts every rank in a session of its own, so neither the script's process group nor its session reaches them.
All of them inherit a variable that is unique to the script, the mark, and are found by it: also by a process that did
not start the script.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psutil

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.claim import ProcessId, claimed_by, process_of
from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import (
    FORGOTTEN,
    RUNNING,
    Job,
    JobClass,
    JobStatus,
    Seen,
    Submission,
    SubmitRefused,
)
from cloudai_mbridge.training.compat.versions import why_unusable
from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE
from cloudai_mbridge.training.warm_start import WARM_START_VARIABLE

_KILL_WAIT_S = 10.0
_KILL_ROUNDS = 10
# The Slurm job in which a script was started, by a user who works in an allocation.
_SLURM_JOB, _STARTED_IN_VARIABLE = "SLURM_JOB_ID", "MBRIDGE_LOCAL_JOB_STARTED_IN"


class Child:
    """A script and the processes it has started on this machine. process is None if another process started it.

    started: on the monotonic clock, since the wall clock can be set.
    """

    def __init__(self, mark: str, directory: Path, pid: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid, self.started = pid, time.monotonic()
        self.directory, self._mark, self._process = directory, mark, process

    @classmethod
    def start(cls, mark: str, script: str, directory: Path, env: Mapping[str, str]) -> Self:
        """Start the script in its directory; its output goes to files there. SubmitRefused: bash cannot be started."""
        try:
            with (directory / POINT_FILES.stdout).open("ab") as out, (directory / POINT_FILES.stderr).open("ab") as err:
                process = subprocess.Popen(
                    ["bash", script],
                    cwd=directory,
                    env={**env, LOCAL_JOB_VARIABLE: mark, _STARTED_IN_VARIABLE: env.get(_SLURM_JOB, "")},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            raise SubmitRefused(f"bash cannot be started: {error}") from None
        return cls(mark, directory, process.pid, process)

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self._mark)

    @classmethod
    def of(cls, job_id: str, directory: Path) -> Self:
        """Return the script that another process has started."""
        process = process_of(job_id) or ProcessId(0, "")
        return cls(process.mark, directory, process.pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs.

        Of a script that another process has started, only its exit code file is available: without it, it was killed.
        """
        if self._process is not None:
            return self._process.poll()
        if _is_marked(self.pid, self._mark):
            return None
        try:
            text = read_regular(self.directory / POINT_FILES.exit_code).decode("ascii", errors="replace").strip()
        except (FileNotFoundError, NotRegular):
            text = ""
        return int(text) if re.fullmatch("[0-9]{1,3}", text) else -signal.SIGKILL

    def age_s(self) -> float | None:
        """Return for how long it has been running; None if it is not."""
        with contextlib.suppress(psutil.Error):
            if _is_marked(self.pid, self._mark):
                return max(0.0, time.time() - float(psutil.Process(self.pid).create_time()))
        return None

    def end(self) -> None:
        """End it: SIGTERM to the whole group, then SIGKILL to whatever is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGTERM)
        end = time.monotonic() + _KILL_WAIT_S
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        self.kill_leftovers()
        if self._process is not None:
            self._process.wait()

    def kill_leftovers(self) -> None:
        """Kill every process that carries the mark, and look again: one may have been starting another.

        A Slurm job that the script submitted carries the mark, too, and is Slurm's. The wait for a process that does
        not die, in an uninterruptible call of a driver, is limited.
        """
        for _ in range(_KILL_ROUNDS):
            found = []
            for process in psutil.process_iter():
                env = _environment(process)
                is_of_same_job = env.get(_SLURM_JOB, "") == env.get(_STARTED_IN_VARIABLE, "")
                if env.get(LOCAL_JOB_VARIABLE) == self._mark and is_of_same_job:
                    found.append(process)
            if not found:
                return
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=1)


def find_marked(mark: str) -> int | None:
    """Return the process id of the script that carries a mark: of all its processes, the leader of its session."""
    for process in psutil.process_iter():
        if _environment(process).get(LOCAL_JOB_VARIABLE) == mark:
            with contextlib.suppress(psutil.Error, OSError):
                leads_its_session, parent = os.getsid(process.pid) == process.pid, process.parent()
                if leads_its_session and (parent is None or _environment(parent).get(LOCAL_JOB_VARIABLE) != mark):
                    return int(process.pid)
    return None


def find_scripts(submissions: Iterable[Submission], root: Path, *, is_launcher: bool = False) -> dict[str, str]:
    """Return the job ids, by run key, of scripts that carry the tokens, and of ended ones that have claimed them.

    A copy without links has lost the claims; the line that a script has written then counts.
    """
    found = {}
    for submission in submissions:
        (run,) = submission.runs
        if (pid := find_marked(submission.token)) is not None:
            found[run.key] = str(ProcessId(pid, submission.token, is_launcher))
        elif holder := claimed_by(root / run.key, submission.token) or _started(root / run.key, submission.token):
            found[run.key] = holder
    return found


def _started(directory: Path, token: str) -> str | None:
    """Return the job id that a script of this token has written."""
    try:
        lines = read_regular(directory / POINT_FILES.started).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotRegular):
        return None
    ids = [line.partition("job=")[2].split(" ")[0] for line in lines]
    return next((job_id for job_id in reversed(ids) if (own := process_of(job_id)) and own.mark == token), None)


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return _environment(psutil.Process(pid)).get(LOCAL_JOB_VARIABLE) == mark
    except psutil.Error:
        return False


def _environment(process: psutil.Process) -> Mapping[str, str]:
    """Return the variables of a living process; empty for another user's process, or after its end."""
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}


class LocalClient:
    """Scripts on this machine. A job's id is its process id and the submission's token."""

    pace, may_be_late = (0.1, 1.0, 0.02), False  # polling processes costs a few milliseconds

    def __init__(
        self, system: LocalSystem, runs: Iterable[RunPlan] = (), require_executor: Callable[[], None] = lambda: None
    ) -> None:
        """runs: may include runs that an earlier process started.

        require_executor: raises ToolFailure unless what the runs' scripts start is installed.
        """
        self._require_executor = require_executor
        self._system = system
        self._time_limits = {run.key: run.time_limit_s for run in runs}
        self._children: dict[str, Child] = {}
        self._ended_because: dict[str, str] = {}
        self._warm_start = {WARM_START_VARIABLE: f"{os.getpid()}.{secrets.token_hex(16)}"} if system.warm_start else {}

    def preflight(self) -> None:
        """Check that the training packages are there, in a version that the loop was tested with."""
        self._require_executor()
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
        return [(run,) for run in runs]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start the script; its output goes to files in its directory."""
        (run,) = submission.runs
        warm_start = {} if run.profiler else self._warm_start  # a profiler follows what the job starts, not a server
        env = {**os.environ, PYTHON_VARIABLE: sys.executable, **run.secret_env, **warm_start}
        child = Child.start(submission.token, POINT_FILES.local_script, root / run.key, env)
        self._children[str(child.id)] = child
        return {run.key: str(child.id)}

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        return find_scripts(submissions, root)

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        return {job.key: Seen(job.job_id, self._status(job)) for job in jobs}

    def observe(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Look for the processes and their exit codes. A process is invisible to other users and other machines."""
        return {job.key: Seen(job.job_id, _observed(job)) for job in jobs}

    def _child(self, job: Job) -> Child:
        """Return a job's process, including a process of an earlier mbridge."""
        if job.job_id not in self._children:
            child = Child.of(job.job_id, job.directory)
            child.started -= child.age_s() or _written_run_time_s(job.directory)
            self._children[job.job_id] = child
        return self._children[job.job_id]

    def _status(self, job: Job) -> JobStatus:
        child = self._child(job)
        code, run_time_s = child.poll(), time.monotonic() - child.started
        if code is None:
            limit_s = self._time_limits.get(job.key)
            if limit_s is None or run_time_s <= limit_s:
                return JobStatus("RUNNING", JobClass.ACTIVE, run_time_s=run_time_s)
            self._ended_because[job.job_id] = "TIMEOUT"
            child.end()
            return self._status(job)
        child.kill_leftovers()  # ranks that outlived their torchrun would slow down the next point
        because = self._ended_because.get(job.job_id, "")
        state = because or ("FAILED" if code else "COMPLETED")
        classes = {"COMPLETED": JobClass.SUCCEEDED, "CANCELLED": JobClass.CANCELLED}
        exit_code = None if because or code < 0 else code
        signal_number = -code if code < 0 else None
        job_class = classes.get(state, JobClass.FAILED)
        return JobStatus(state, job_class, exit_code, signal_number, run_time_s=run_time_s)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End the jobs: SIGTERM to the whole group, then SIGKILL."""
        for job in jobs:
            if self._child(job).poll() is None:
                self._ended_because[job.job_id] = "CANCELLED"
                self._child(job).end()

    def throttle(self, jobs: Iterable[Job], parallel: int) -> None:
        """Do nothing: each job is a submission of its own."""

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


def _observed(job: Job) -> JobStatus:
    child = Child.of(job.job_id, job.directory)
    if (code := child.poll()) is None:
        return JobStatus(RUNNING, JobClass.ACTIVE, run_time_s=child.age_s())
    if code < 0:
        reason = "its process is not on this machine, or invisible to this user, and it left no exit code"
        return JobStatus(FORGOTTEN, JobClass.UNKNOWN, reason=reason)
    state, job_class = ("FAILED", JobClass.FAILED) if code else ("COMPLETED", JobClass.SUCCEEDED)
    return JobStatus(state, job_class, exit_code=code, run_time_s=_written_run_time_s(job.directory))


def _written_run_time_s(directory: Path) -> float:
    """Return the time between a script's first and last line about itself; one clock, the file server's, dates both."""
    try:
        started, ended = ((directory / name).stat().st_mtime for name in (POINT_FILES.started, POINT_FILES.exit_code))
    except OSError:
        return 0.0
    return max(0.0, ended - started)
