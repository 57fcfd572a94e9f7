"""Processes of the product without the seconds that each takes to import it: forked from a server that did it once.

There is a server for the command line, one for ranks of the training program, with torch and Megatron-Core, and one for
those of Megatron-Bridge: one of each for all workers of a session, started when it is first asked, and ending with the
session. It is an interpreter that has imported what its kind needs and nothing else, not a fork of the process that
collected the tests: a rank must not see what 400 modules of tests have imported, patched or set in the environment.
What is forked is a process of its own, with its own arguments, environment, directory and files, and ends as any other.
Ranks have torchrun's variables, and gloo. What decides how an interpreter starts (`PYTHONPATH` and others) needs a real
one, and so does a rank where a GPU is usable: CUDA does not survive a fork. What torchrun itself does is tested in
tests/training/test_exits.py and test_hang.py, and in tests/e2e.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import process
from pathlib import Path
from typing import Any, Protocol

_DECIDES_THE_START = re.compile("PYTHON|LANG|LC_|LD_")
_ENVIRONMENT = dict(os.environ)  # that of the session, before any test has changed it
STARTS = "tests.forked"  # the audit event of a start
KINDS = ("commands", "ranks", "bridge")
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
    """A server, seen from the tests; several requests at once are served. kind: "commands", "ranks" or "bridge"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def run(
        self, program: Sequence[str], directory: Path, env: Mapping[str, str], *, processes: int = 1, timeout: float
    ) -> "subprocess.CompletedProcess[str] | None":
        """Run `python PROGRAM`; None if that needs a real start. Several processes end as under torchrun, with 1 or 0.

        Raises:
            TimeoutExpired: one process has not ended.
        """
        if _deciding(env) != _deciding(_ENVIRONMENT):
            return None
        with tempfile.TemporaryDirectory(prefix="mbridge-forked-") as outputs:
            out, err = Path(outputs, "stdout"), Path(outputs, "stderr")
            where = {"directory": str(directory), "stdout": str(out), "stderr": str(err)}
            code = self._ask(
                {**where, "program": list(program), "env": dict(env), "processes": processes, "timeout": timeout}
            )
            if code == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(list(program), timeout)
            return subprocess.CompletedProcess(list(program), code, _text(out), _text(err))

    def start(
        self, program: Sequence[str], directory: Path, env: Mapping[str, str], stdout: Path, stderr: Path
    ) -> "Forked | None":
        """Start `python PROGRAM`; None if that needs a real start."""
        if _deciding(env) != _deciding(_ENVIRONMENT):
            return None
        where = {"directory": str(directory), "stdout": str(stdout), "stderr": str(stderr)}
        return Forked(
            self, self._ask({**where, "program": list(program), "env": dict(env), "processes": 1, "timeout": 0.0})
        )

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a process that was started, None while it runs."""
        code: int | None = self._ask({"ended": pid})
        return code

    def _ask(self, request: Mapping[str, Any]) -> Any:
        sys.audit(STARTS)
        servers = _servers()
        if servers.owner == os.getpid():
            servers.start(self._kind)
        with socket.socket(socket.AF_UNIX) as connection, suppress(ConnectionError):
            connection.connect(str(servers.socket_of(self._kind)))
            if answer := _exchange(connection, request):
                return json.loads(answer)
        raise ChildProcessError(f"the server of {self._kind} has ended:\n{_text(servers.log_of(self._kind))}")


class Servers:
    """The servers of this process and of those that it forks. A process that has asked waits while they import."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="mb-servers-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self.not_started = {kind: self._listen(kind) for kind in KINDS}
        atexit.register(self._end)

    def socket_of(self, kind: str) -> Path:
        return self._directory / f"{kind}.socket"

    def log_of(self, kind: str) -> Path:
        return self._directory / f"{kind}.log"

    def start(self, kind: str) -> None:
        """Start a server that is not started yet."""
        with self._lock:
            if kind not in self._processes:
                self._processes[kind] = self._started(kind)

    def _started(self, kind: str) -> "subprocess.Popen[bytes]":
        with self.not_started.pop(kind) as listening, self.log_of(kind).open("w") as log:
            return subprocess.Popen(
                # -P: `tests/` holds a directory `transformer_engine`
                [sys.executable, "-P", __file__, kind, str(listening.fileno()), str(self.owner)],
                env={**_ENVIRONMENT, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )

    def _listen(self, kind: str) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.socket_of(kind)))
        listening.listen(128)
        return listening

    def _end(self) -> None:
        if os.getpid() != self.owner:
            return
        for kind, server in self._processes.items():
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.connect(str(self.socket_of(kind)))
                _exchange(connection, {"end": True})
            server.wait()  # time(1) counts what it has used
        for listening in self.not_started.values():
            listening.close()
        shutil.rmtree(self._directory, ignore_errors=True)


@functools.cache
def _servers() -> Servers:
    return Servers()


def shared_servers() -> Servers:
    """Return the servers, for the workers that are forked after this; this process starts those that are asked."""
    return _servers()


def _exchange(connection: socket.socket, request: Mapping[str, Any]) -> str:
    """Return the answer to a request, "" if there is none."""
    with connection.makefile() as answers:
        connection.sendall(json.dumps(request).encode() + b"\n")
        return answers.readline()


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


class _Requests:
    """The requests that a server has accepted, and their processes."""

    def __init__(self, listening: int, owner: int) -> None:
        """owner: the process with which the server ends."""
        self._listening, self._owner = socket.socket(fileno=listening), os.pidfd_open(owner)
        self._asking: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the leader's process
        self._started: set[int] = set()
        self._ready = selectors.PollSelector()
        for file in (self._listening, self._owner):
            self._ready.register(file, selectors.EVENT_READ)

    def next_in_child(self) -> Mapping[str, Any] | None:
        """Serve until this is a forked process: return its request. None: the server has ended."""
        while True:
            for file in [key.fileobj for key, _ in self._ready.select()]:
                if file == self._owner:
                    return self._end()
                if file is self._listening:
                    connection, _ = self._listening.accept()
                    if (request := self._accept(connection)) is not None:
                        return self._end() if "end" in request else request
                elif isinstance(file, int) and file in self._asking:
                    self._answer(file)
                elif isinstance(file, socket.socket):
                    self._hang_up(file)

    def _accept(self, connection: socket.socket) -> Mapping[str, Any] | None:
        """Start what a request is for, or answer it; return it in the child."""
        with connection.makefile() as lines:
            line = lines.readline()
        if not line:  # has ended
            connection.close()
            return None
        request: Mapping[str, Any] = json.loads(line)
        if "end" in request:
            connection.close()
            return request
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            self._started.discard(pid)
            _send(connection, os.waitstatus_to_exitcode(status) if pid else None)
        elif (leader := os.fork()) == 0:
            os.setpgid(0, 0)
            connection.close()
            self._forget()
            return request
        elif request["timeout"]:
            with suppress(OSError):  # it has done it itself
                os.setpgid(leader, leader)
            descriptor = os.pidfd_open(leader)
            self._asking[descriptor] = leader, connection
            for file in (descriptor, connection):
                self._ready.register(file, selectors.EVENT_READ)
        else:
            self._started.add(leader)
            _send(connection, leader)
        return None

    def _answer(self, descriptor: int) -> None:
        """Answer with the exit code of a process that has ended."""
        leader, connection = self._asking.pop(descriptor)
        for file in (descriptor, connection):
            with suppress(KeyError):  # it has hung up
                self._ready.unregister(file)
        os.close(descriptor)
        _send(connection, os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]))

    def _hang_up(self, connection: socket.socket) -> None:
        """End the processes of a worker that has ended."""
        self._ready.unregister(connection)
        for leader, asking in self._asking.values():
            if asking is connection:
                with suppress(ProcessLookupError):
                    os.killpg(leader, signal.SIGKILL)

    def _end(self) -> None:
        _end_all([*self._started, *(leader for leader, _ in self._asking.values())])

    def _forget(self) -> None:
        """Close in a child what is the server's."""
        self._ready.close()
        self._listening.close()
        os.close(self._owner)
        for descriptor, (_, connection) in self._asking.items():
            os.close(descriptor)
            connection.close()


def _send(connection: socket.socket, answer: int | None) -> None:
    with connection, suppress(OSError):  # the worker may have ended
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _end_all(leaders: Iterable[int]) -> None:
    """End processes and what they have started, after a time for their own end."""
    left, kill_at = set(leaders), time.monotonic() + _GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for leader in left:
            with suppress(ProcessLookupError):
                os.killpg(leader, number)
        while left and time.monotonic() < kill_at:
            left = {leader for leader in left if not os.waitpid(leader, os.WNOHANG)[0]}
            time.sleep(0.05)


def _serve(kind: str, listening: int, owner: int) -> int:
    """Answer requests until the owner ends; return the code of a process if this has become one."""
    atexit.register(_leave)  # the first that is registered is the last that runs
    requests = _Requests(listening, owner)
    import_all(kind)
    gc.freeze()  # imported modules stay: no collection of a fork visits and copies them
    request = requests.next_in_child()
    return 0 if request is None else _end(request)


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
    sys.exit(_serve(sys.argv[1], *map(int, sys.argv[2:])))
