"""Processes of the product without the seconds that each takes to import it: forked from a server that did it once.

There is a server for the command line, one for ranks of the training program, with torch and Megatron-Core, and one for
those of Megatron-Bridge. What is forked is a process of its own, with its own arguments, environment, directory and
files, and ends as any other. Ranks have torchrun's variables, and gloo. What decides how an interpreter starts
(`PYTHONPATH` and others) needs a real one, and so does a rank where a GPU is usable: CUDA does not survive a fork. What
torchrun itself does is tested in tests/training/test_exits.py and test_hang.py, and in tests/e2e.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing import process
from pathlib import Path
from typing import Any, Protocol

_DECIDES_THE_START = re.compile("PYTHON|LANG|LC_|LD_")
_GRACE_S = 10.0
_codes: dict[int, int] = {}  # of this process, once it ends


class Process(Protocol):
    """What `Forked` and `subprocess.Popen` have in common."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ForkServer:
    """A server, seen from the tests. kind: "commands", "ranks" or "bridge"."""

    def __init__(self, kind: str) -> None:
        self._kind, self._start = kind, _deciding(os.environ)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, program: Sequence[str], directory: Path, env: Mapping[str, str], *, processes: int = 1, timeout: float
    ) -> "subprocess.CompletedProcess[str] | None":
        """Run `python PROGRAM`; None if that needs a real start. Several processes end as under torchrun, with 1 or 0.

        Raises:
            TimeoutExpired: one process has not ended.
        """
        if _deciding(env) != self._start or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._run(list(program), directory, env, processes, timeout)
        finally:
            self._lock.release()

    def start(
        self, program: Sequence[str], directory: Path, env: Mapping[str, str], stdout: Path, stderr: Path
    ) -> "Forked | None":
        """Start `python PROGRAM`; None if that needs a real start."""
        if _deciding(env) != self._start:
            return None
        where = {"directory": str(directory), "stdout": str(stdout), "stderr": str(stderr)}
        with self._lock:
            pid = self._ask({**where, "program": list(program), "env": dict(env), "processes": 1, "timeout": 0.0})
        return Forked(self, pid)

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a process that was started, None while it runs."""
        with self._lock:
            return self._ask({"ended": pid})

    def _run(
        self, program: list[str], directory: Path, env: Mapping[str, str], processes: int, timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory(prefix="mbridge-forked-") as outputs:
            out, err = Path(outputs, "stdout"), Path(outputs, "stderr")
            where = {"directory": str(directory), "stdout": str(out), "stderr": str(err)}
            code = self._ask(
                {**where, "program": program, "env": dict(env), "processes": processes, "timeout": timeout}
            )
            if code == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(program, timeout)
            return subprocess.CompletedProcess(program, code, _text(out), _text(err))

    def _ask(self, request: Mapping[str, Any]) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, self._kind],  # `tests/` holds a directory `transformer_engine`
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            atexit.register(self._end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def _end(self) -> None:
        assert self._process is not None
        with self._process:
            self._process.kill()


class Forked:
    """A process that a server has started, to be used as one of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raise TimeoutExpired as Popen does."""
        end = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _deciding(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _DECIDES_THE_START.match(name)}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _serve(kind: str) -> int:
    """Answer each request with an exit code, to the last; return the code of a process if this has become one."""
    atexit.register(_leave)  # the first that is registered is the last that runs
    with redirect_stdout(sys.stderr):  # the answers go to stdout
        import_all(kind)
    gc.freeze()  # imported modules stay: no collection of a fork visits and copies them
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else "null", flush=True)
        elif (leader := os.fork()) == 0:
            return _end(request)
        elif request["timeout"]:
            print(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]), flush=True)
        else:
            print(leader, flush=True)
    return 0


def import_all(kind: str) -> None:
    """Import what every process of a kind imports."""
    if kind == "commands":
        import cloudai_mbridge.cli
        import cloudai_mbridge.commands
        import cloudai_mbridge.gate  # what some commands import later: these take the longest
        import cloudai_mbridge.report

        for package in (cloudai_mbridge.commands, cloudai_mbridge.gate, cloudai_mbridge.report):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        return
    if kind == "bridge":
        sys.path.append(str(Path(__file__).parents[1]))
        from tests.interop.bridge_loop.upstream_on_cpu import install

        return install()
    from cloudai_mbridge.training.cpu import import_megatron

    import_megatron()
    import cloudai_mbridge.training.finetune
    import cloudai_mbridge.training.gpt_step
    import cloudai_mbridge.training.pretrain
    from cloudai_mbridge.training.process.provenance import package_versions

    importlib.import_module("cloudai_mbridge.training.config.text.overrides")
    importlib.import_module("torch._dynamo")  # every optimizer imports it
    package_versions()


def _end(request: Mapping[str, Any]) -> int:
    """Be a process that ends as the interpreter does, but for freeing what the server has imported.

    That takes longer than a short training: all pages of it are copied to be changed.
    """
    code: Any = 1
    try:
        code = _lead(request)
        return code
    except SystemExit as end:
        code = end.code
        raise
    finally:
        if not isinstance(sys.exc_info()[1], KeyboardInterrupt):  # ends by SIGINT
            _codes[os.getpid()] = int(bool(code)) if not isinstance(code, int) else code & 0xFF


def _leave() -> None:
    """End here, after all other functions of `atexit`, which is when the interpreter would begin to free."""
    if (code := _codes.get(os.getpid())) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lead(request: Mapping[str, Any]) -> int:
    """Be torchrun, or the only process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    count = request["processes"]
    if count == 1:
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        return _run(request, {})
    ranks = {}
    for rank in range(count):
        port_out, port_in = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(port_in)
            return _run(request, _variables(rank, count, os.read(port_out, 16).decode()))
        os.close(port_out)
        ranks[pid] = port_in
    return _watch(ranks, request["timeout"])


def _variables(rank: int, count: int, port: str) -> dict[str, str]:
    """Return what torchrun sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    counts = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "ROLE_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    texts = {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**numbers, **counts, **restarts, **texts, **where}.items()}


def _watch(ranks: dict[int, int], timeout: float) -> int:
    """Be the store of the ranks, end all of them if one fails or the time is up, and return torchrun's exit code."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for port_in in ranks.values():
        os.write(port_in, str(store.port).encode())
        os.close(port_in)
    left, failed, kill_at = set(ranks), False, time.monotonic() + timeout
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        left.discard(pid)
        if pid and status and not failed:
            failed, kill_at = True, time.monotonic() + _GRACE_S
            _signal(left, signal.SIGTERM)
        if time.monotonic() > kill_at:
            _signal(left, signal.SIGKILL)
        if not pid:
            time.sleep(0.01)
    os._exit(int(failed))  # the store's thread has nothing to finish


def _signal(processes: set[int], number: int) -> None:
    for pid in processes:
        os.kill(pid, number)


def _run(request: Mapping[str, Any], more: Mapping[str, str]) -> int:
    """Run the program as the interpreter would."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["directory"])
    process.ORIGINAL_DIR = request["directory"]  # where a spawned process looks for the program
    os.environ.clear()
    os.environ.update({**request["env"], **more})
    first, *arguments = request["program"]
    if first == "-m":
        sys.path[0], sys.argv = request["directory"], arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).parent.absolute()), [first, *arguments]
        runpy.run_path(first, run_name="__main__")
    return 0


COMMANDS = ForkServer("commands")


def run_mbridge(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 1500
) -> "subprocess.CompletedProcess[str]":
    """Run the command line as a user does, without a terminal. env: over that of the tests."""
    program, whole_env = ["-m", "cloudai_mbridge", *map(str, args)], {**os.environ, **(env or {})}
    return COMMANDS.run(program, cwd, whole_env, timeout=timeout) or subprocess.run(
        [sys.executable, *program],
        stdin=subprocess.DEVNULL,
        env=whole_env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
