"""A script as a process that leaves none of its processes behind.

torchrun starts every rank in a session of its own, so neither the script's process group nor its session reaches them.
All of them inherit a variable that is unique to the script, the mark, and are found by it: also by a process that did
not start the script.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.launch.job_ids import ProcessId, process_of
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.schedulers.interface import SubmitRefused
from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE

_KILL_WAIT_S = 10.0
_KILL_ROUNDS = 10
# The Slurm job in which a script was started, by a user who works in an allocation.
_SLURM_JOB, _STARTED_IN_VARIABLE = "SLURM_JOB_ID", "MBRIDGE_LOCAL_JOB_STARTED_IN"


class Child:
    """A script and the processes it has started on this machine. process is None if another process started it."""

    def __init__(self, mark: str, directory: Path, pid: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self._mark, self._directory, self._process = mark, directory, process

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
            text = read_regular(self._directory / POINT_FILES.exit_code).decode("ascii", errors="replace").strip()
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

        The wait for a process that does not die, in an uninterruptible call of a driver, is limited.
        """
        for _ in range(_KILL_ROUNDS):
            found = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not found:
                return
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=1)

    def _is_ours(self, process: psutil.Process) -> bool:
        """Return whether it carries the mark; a Slurm job that the script submitted carries it too, and is Slurm's."""
        env = _environment(process)
        is_of_same_job = env.get(_SLURM_JOB, "") == env.get(_STARTED_IN_VARIABLE, "")
        return env.get(LOCAL_JOB_VARIABLE) == self._mark and is_of_same_job


def find_marked(mark: str) -> int | None:
    """Return the process id of the script that carries a mark: of all its processes, the leader of its session."""
    for process in psutil.process_iter():
        if _environment(process).get(LOCAL_JOB_VARIABLE) == mark:
            with contextlib.suppress(psutil.Error, OSError):
                leads_its_session, parent = os.getsid(process.pid) == process.pid, process.parent()
                if leads_its_session and (parent is None or _environment(parent).get(LOCAL_JOB_VARIABLE) != mark):
                    return int(process.pid)
    return None


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
