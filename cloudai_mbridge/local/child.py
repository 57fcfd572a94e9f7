"""A script as a child process that leaves none of its processes behind.

torchrun starts every rank in a session of its own, so neither the script's process group nor its session reaches them.
All of them inherit a variable that is unique to the child, and are found by it.
"""

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from cloudai_mbridge.jobs import SubmitRefused
from cloudai_mbridge.plan import POINT_FILES

_KILL_WAIT_S = 10.0
_KILL_ROUNDS = 10
_MARK_VARIABLE = "MBRIDGE_LOCAL_JOB"
_SLURM_JOB = "SLURM_JOB_ID"


class Child:
    """A running script, and what it has started on this machine."""

    def __init__(self, script: str, directory: Path, env: Mapping[str, str]) -> None:
        """Start the script in its directory; its output goes to files there.

        Raises:
            SubmitRefused: bash cannot be started.
        """
        self._mark = uuid.uuid4().hex
        self._slurm_job = env.get(_SLURM_JOB)
        try:
            with (directory / POINT_FILES.stdout).open("ab") as out, (directory / POINT_FILES.stderr).open("ab") as err:
                self._process = subprocess.Popen(
                    ["bash", script],
                    cwd=directory,
                    env={**env, _MARK_VARIABLE: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            raise SubmitRefused(f"bash cannot be started: {error}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it: SIGTERM to the whole group, then SIGKILL to whatever is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        self.kill_leftovers()
        self._process.wait()

    def kill_leftovers(self) -> None:
        """Kill every process that carries the mark, and look again: one may have been starting another.

        One that does not die, in an uninterruptible call of a driver, is not waited for without end.
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
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            env = process.environ()
        except (psutil.Error, OSError):
            return False
        return bool(env.get(_MARK_VARIABLE) == self._mark and env.get(_SLURM_JOB) == self._slurm_job)
