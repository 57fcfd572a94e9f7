"""Ranks that run one program after another, to spare tests the start of processes and of their process group.

Tests with the marker `kept_ranks` use them through the fixtures `train` and `ranks`, and change nothing else: each run
has its own arguments, directory, environment and output, and ends with its own exit code. Ranks are started for the
first run of a number of processes, and end with the module. torch's process group stays up from run to run;
Megatron-Core's groups do not, nor do warnings, signals and environment variables.

A run that fails, dies or hangs takes its ranks with it: the next one starts new ones. Tests of how processes start,
fail or end, and of what a process sets once for all, need ranks of their own.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import process
from pathlib import Path
from typing import Any

from tests.forked import ForkServer, Process

_REPOSITORY = Path(__file__).parents[1]
_GRACE_S = 10.0  # as torchrun gives the other ranks when one has failed


class KeptRanks:
    """The ranks of a module, by number of processes. server: forks them where that is possible."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._launches: dict[int, _Launch] = {}

    def run(
        self, processes: int, program: Sequence[str], directory: Path, env: Mapping[str, str], timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python PROGRAM` on all ranks. The exit code is 1 if one of several fails; a single one has its own."""
        launch = self._launches.pop(processes, None) or _Launch(self._server, processes, env)
        with tempfile.TemporaryDirectory(prefix="mbridge-kept-") as outputs:
            out, err = Path(outputs, "stdout"), Path(outputs, "stderr")
            out.touch()
            err.touch()
            where = {"directory": str(directory), "stdout": str(out), "stderr": str(err)}
            ends = launch.run({**where, "program": list(program), "env": dict(env)}, timeout)
            failed = [f"rank {rank}: {end}\n" for rank, end in enumerate(ends) if end != 0]
            if failed:
                launch.end()
            else:
                self._launches[processes] = launch
            code = int(bool(failed)) if processes > 1 or not isinstance(ends[0], int) else ends[0]
            return subprocess.CompletedProcess(program, code, out.read_text(), err.read_text() + "".join(failed))

    def end(self) -> None:
        for launch in self._launches.values():
            launch.end()
        self._launches.clear()


class _Launch:
    """Ranks that are up."""

    def __init__(self, server: ForkServer, processes: int, env: Mapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mbridge-ranks-")
        place = Path(self._directory.name)
        self._store: Any = None  # as torchrun has it, for several ranks
        if processes > 1:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[Process] = []
        self._connections: list[socket.socket] = []
        for rank in range(processes):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(place / f"{rank}"))
                listener.listen()
                listener.settimeout(600.0)
                more = {} if self._store is None else _variables(rank, processes, self._store.port)
                self._ranks.append(_start(server, place, rank, {**env, **more}))
                self._connections.append(listener.accept()[0])

    def run(self, request: Mapping[str, Any], timeout: float) -> list[int | str]:
        """Return how the program has ended on each rank: with an exit code, or what kept it from that."""
        line = json.dumps(request).encode() + b"\n"
        for connection in self._connections:
            with suppress(ConnectionError):  # the rank has ended since: it has no answer either
                connection.sendall(line)
        ends: dict[int, int | str] = {}
        until = time.monotonic() + timeout
        while len(ends) < len(self._ranks) and time.monotonic() < until:
            for rank in set(range(len(self._ranks))) - set(ends):
                end = self._end_of(rank)
                if end is not None:
                    ends[rank] = end
                    if end != 0:
                        until = min(until, time.monotonic() + _GRACE_S)
        return [ends.get(rank, "has not ended") for rank in range(len(self._ranks))]

    def _end_of(self, rank: int) -> int | str | None:
        """Wait shortly for the answer of a rank."""
        self._connections[rank].settimeout(0.01)
        try:
            answer = self._connections[rank].recv(100)
        except TimeoutError:
            return None
        except ConnectionError:
            answer = b""
        return int(answer) if answer else f"has ended with {self._ranks[rank].wait(600.0)}"

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank, connection in zip(self._ranks, self._connections, strict=True):
            rank.wait(600.0)
            connection.close()
        self._directory.cleanup()


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    counts = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "ROLE_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1}
    texts = {"TORCHELASTIC_RUN_ID": "kept", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in {**numbers, **counts, **texts, "MASTER_PORT": port}.items()}


def _start(server: ForkServer, place: Path, rank: int, env: Mapping[str, str]) -> Process:
    program = ["-m", "tests.kept_ranks", str(place / str(rank))]
    out, err = place / "stdout", place / "stderr"
    import torch

    if not torch.cuda.is_available() and (forked := server.start(program, _REPOSITORY, env, out, err)) is not None:
        return forked
    with out.open("a") as stdout, err.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, *program], cwd=_REPOSITORY, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )


# ---- in a rank


def _serve(place: str) -> None:
    """Run programs until the tests have no more, and answer each with its exit code."""
    from cloudai_mbridge.training.cpu import import_megatron

    import_megatron()
    import torch
    import torch.distributed as dist

    from cloudai_mbridge.training.process.device import bind_local_device

    always = {name: value for name, value in os.environ.items() if name in _variables(0, 1, 0)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        if always:  # else each run has a process group of its own, as without torchrun
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            bind_local_device(backend)
            dist.init_process_group(backend)
        for line in connection.makefile():
            code = _run(json.loads(line), always)
            connection.sendall(str(code).encode())
            if code != 0:
                signal.pause()  # until it is killed: other ranks may still read from this one


def _run(request: Mapping[str, Any], always: Mapping[str, str]) -> int:
    """Run a program as the interpreter would, and forget its settings."""
    _write_to(request["stdout"], request["stderr"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    os.chdir(request["directory"])
    process.ORIGINAL_DIR = request["directory"]  # where a spawned process looks for the program
    os.environ.clear()
    os.environ.update({**request["env"], **always})
    code: Any = 0
    try:
        with warnings.catch_warnings():
            _run_program(*request["program"])
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _forget_layout()
        gc.enable()
        gc.collect()
    return int(code)


def _run_program(first: str, *arguments: str) -> None:
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).parent.absolute()), [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def _write_to(stdout: str, stderr: str) -> None:
    for descriptor, name in ((1, stdout), (2, stderr)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


def _forget_layout() -> None:
    """Take down Megatron-Core's groups and what it keeps of a run, so that the next one makes its own."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

    if dist.is_initialized():
        dist.barrier()  # no rank closes a connection that another still reads
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()


if __name__ == "__main__":
    _serve(sys.argv[1])
