"""Ranks that were forked before torchrun has threads, and given to it as the processes that it starts."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE
from cloudai_mbridge.training.warm_start.kernel import show

_POLL_S = 0.01
_PYTHON = (sys.executable, "-u", "-m")
_OPENMP = "OMP_NUM_THREADS"  # libraries have read it
_openmp_threads = os.environ.get(_OPENMP)
_Handler: Any = SubprocessHandler
_start_cold = _Handler._popen  # a release without it cannot start warm


class ForkedRank:
    """A process that waits for its order; to torchrun, a `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.connection = connection

    def order(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Have it run `python -u -m MODULE ARGUMENT ...`, from when on it is in a session of its own."""
        with self.connection:
            self.connection.recv(1)
            self.connection.sendall(json.dumps({"command": command, "environment": env}).encode())

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raise subprocess.TimeoutExpired if it does not end."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        return code


def waiting_ranks(number: int) -> dict[str, Any] | None:
    """Fork the ranks, and have torchrun use them: None in this process. Return its order in a rank that got one."""
    ranks: list[ForkedRank] = []
    for _ in range(number):
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            for connection in (ours, *(rank.connection for rank in ranks)):
                connection.close()
            return _wait(theirs)
        theirs.close()
        ranks.append(ForkedRank(pid, ours))
    _give_to_torchrun(ranks)
    return None


def _wait(connection: socket.socket) -> dict[str, Any]:
    os.setsid()
    with connection, connection.makefile() as orders:
        connection.sendall(b"\n")
        text = orders.read()
    if not text:
        os._exit(1)  # torchrun has ended before it started this rank
    order: dict[str, Any] = json.loads(text)
    return order


def _give_to_torchrun(ranks: list[ForkedRank]) -> None:
    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        is_plain = args[:3] == _PYTHON and self._stdout is None and self._stderr is None
        if not ranks or not is_plain or env.get(_OPENMP) != _openmp_threads:
            return _start_cold(self, args, env)
        rank = ranks.pop(0)
        rank.order(args, env)
        return rank

    _Handler._popen = popen


def become(order: Mapping[str, Any]) -> None:
    """Run the program as `python -u -m MODULE ARGUMENT ...` would."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun handles them, so what it starts does not
        signal.signal(number, signal.SIG_DFL)  # ignore them, even under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    show(order["command"], LOCAL_JOB_VARIABLE, os.environ[LOCAL_JOB_VARIABLE])
    module, *sys.argv[1:] = order["command"][len(_PYTHON) :]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
