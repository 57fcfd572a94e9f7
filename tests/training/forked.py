"""Ranks without the seconds that every one of them takes to import torch and Megatron-Core.

A server imports both once for a pytest process, and forks the ranks of each request from itself. Apart from that they
are what torchrun starts: processes of their own, with its variables, on gloo. Where a GPU is usable, torchrun starts
them: CUDA does not survive a fork. What torchrun itself does is tested in test_exits.py, test_hang.py and tests/e2e.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import process
from pathlib import Path
from typing import Any

LONGEST_S = 300.0
_GRACE_S = 10.0


class RankServer:
    """The server, seen from the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._end)

    def run(self, processes: int, program: Sequence[str], directory: Path) -> "subprocess.CompletedProcess[str]":
        """Run `python PROGRAM` in a directory on several ranks; more than one end as under torchrun, with 1 or 0."""
        with tempfile.TemporaryDirectory(prefix="mbridge-ranks-") as outputs:
            out, err = Path(outputs, "stdout"), Path(outputs, "stderr")
            request = {"processes": processes, "program": list(program), "directory": str(directory)}
            answer = self._ask({**request, "stdout": str(out), "stderr": str(err), "env": dict(os.environ)})
            return subprocess.CompletedProcess(list(program), answer, _text(out), _text(err))

    def _ask(self, request: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _serve() -> int:
    """Answer each request with an exit code, to the last; return the code of a rank if this has become one."""
    from cloudai_mbridge.training.cpu import import_megatron

    import_megatron()
    import cloudai_mbridge.training.finetune
    import cloudai_mbridge.training.gpt_step
    import cloudai_mbridge.training.pretrain  # noqa: F401

    while line := sys.stdin.readline():
        if (leader := os.fork()) == 0:
            return _lead(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]), flush=True)
    return 0


def _lead(request: Mapping[str, Any]) -> int:
    """Be torchrun, or the only rank."""
    count = request["processes"]
    if count == 1:
        signal.alarm(int(LONGEST_S))
        return _run(request, {})
    ranks = {}
    for rank in range(count):
        port_out, port_in = os.pipe()
        if (process := os.fork()) == 0:
            os.close(port_in)
            return _run(request, _variables(rank, count, os.read(port_out, 16).decode()))
        os.close(port_out)
        ranks[process] = port_in
    return _watch(ranks)


def _variables(rank: int, count: int, port: str) -> dict[str, str]:
    """Return what torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    counts = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "ROLE_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    texts = {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**numbers, **counts, **restarts, **texts, **where}.items()}


def _watch(ranks: dict[int, int]) -> int:
    """Be the store of the ranks, end all of them if one fails or the time is up, and return torchrun's exit code."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for port_in in ranks.values():
        os.write(port_in, str(store.port).encode())
        os.close(port_in)
    left, failed, kill_at = set(ranks), False, time.monotonic() + LONGEST_S
    while left:
        process, status = os.waitpid(-1, os.WNOHANG)
        left.discard(process)
        if process and status and not failed:
            failed, kill_at = True, time.monotonic() + _GRACE_S
            _signal(left, signal.SIGTERM)
        if time.monotonic() > kill_at:
            _signal(left, signal.SIGKILL)
        if not process:
            time.sleep(0.01)
    os._exit(int(failed))  # the store's thread has nothing to finish


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def _run(request: Mapping[str, Any], more: Mapping[str, str]) -> int:
    """Run the program as the interpreter would."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["directory"])
    process.ORIGINAL_DIR = request["directory"]  # where a spawned process looks for the program
    os.environ.clear()
    os.environ.update({**request["env"], "OMP_NUM_THREADS": "1", **more})
    first, *arguments = request["program"]
    if first == "-m":
        sys.path[0], sys.argv = request["directory"], arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).parent.absolute()), [first, *arguments]
        runpy.run_path(first, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
