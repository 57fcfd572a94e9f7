"""torchrun and ranks, forked by a server that has imported torch and Megatron-Core. Standard library only."""

import ctypes
import gc
import hashlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import popen_fork, process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.versions import GPU_DRIVERS
from cloudai_mbridge.training.process.hang import TIMEOUT_VARIABLE
from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE

WARM_START_VARIABLE = "MBRIDGE_WARM_START"  # PID.SECRET: servers end with this process; addresses contain the secret
# Read when a job runs, never by an import. All other variables of job and server are equal.
_OF_A_JOB = {LOCAL_JOB_VARIABLE, TIMEOUT_VARIABLE, "PWD", "OLDPWD", "SHLVL", "_"}


def start_server() -> str | None:
    """Return the name of this environment's server, started unless it runs; None: everything starts cold."""
    owner, _, secret = os.environ.pop(WARM_START_VARIABLE, "").partition(".")
    customs = [getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize")]
    is_custom = any(Path(file).parent != Path(os.__file__).parent for file in customs if file)  # may read the rank
    if not owner or is_custom or LOCAL_JOB_VARIABLE not in os.environ or any(map(os.path.exists, GPU_DRIVERS)):
        return None  # CUDA does not survive a fork
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    env[LOCAL_JOB_VARIABLE] = "-" * len(os.environ[LOCAL_JOB_VARIABLE])
    if sys.argv[1:3] != ["--nproc-per-node", "1"]:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    key = os.fsencode(repr([owner, sys.executable, sorted(env.items())]))
    server = "mbridge-" + hashlib.blake2b(key, key=secret.encode(), digest_size=16).hexdigest()
    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):  # it runs
        listener.bind(f"\0{server}")
        listener.listen()
        command = [sys.executable, "-u", "-c", f"from {__name__} import serve; serve()", owner, str(listener.fileno())]
        files: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        options: Any = {"cwd": "/", "env": env, "pass_fds": [listener.fileno()], "start_new_session": True}
        subprocess.Popen([*command, " " * 256], **files, **options)  # room for a rank's command line in /proc
    return server


class Forked(popen_fork.Popen):
    """`python -u -m ...`, run in a fork of a server; to torchrun, a `subprocess.Popen`. OSError, EOFError: none."""

    def __init__(self, *order: Any) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{order[0]}")
            _check_peer(connection)
            socket.send_fds(connection, [b"\n"], [0, 1, 2])
            self._server = Connection(connection.detach())
        self.returncode, self.sentinel = None, self._server.fileno()
        self._server.send((*order[1:], str(Path.cwd())))
        self.pid = self._server.recv()
        self._server.send(None)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and (flag == 0 or self._server.poll()):
            self.returncode = -signal.SIGKILL
            with suppress(OSError, EOFError):  # the waiting process was killed
                self.returncode = int(self._server.recv())
        return self.returncode


def _check_peer(connection: socket.socket) -> None:
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8] != os.getuid().to_bytes(4, sys.byteorder):
        raise PermissionError("the process at the other end is another user's")


def serve() -> None:
    """Fork until the owner has ended, or no fork has run for 3 minutes; a fork returns once it has ended."""
    owner, listener = os.pidfd_open(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    signal.alarm(600)  # an import that hangs, in a file system, ends
    is_fit = _import()
    signal.alarm(0)
    forks: set[int] = set()
    while is_fit and owner not in (ready := wait([owner, listener], 180)) and (ready or forks):
        forks = {pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if ready:
            connection, _ = listener.accept()
            if (pid := os.fork()) == 0:
                listener.close()
                os.close(owner)
                _, _, _, module, *sys.argv[1:] = _become(connection)
                sys.path[:1] = sys.path[:1] if sys.flags.safe_path else [os.getcwd()]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                return
            forks.add(pid)
            connection.close()


def _import() -> bool:
    """Import the forks' modules; return whether this process can fork: it has no thread and no CUDA."""
    import_module("cloudai_mbridge.training.process.loopback").resolve_no_name()
    import_module("cloudai_mbridge.training.cpu").import_megatron()
    training = ("finetune", "gpt_step", "config.text.overrides")
    for module in ("torch._dynamo", "torch.distributed.run", *map("cloudai_mbridge.training.{}".format, training)):
        import_module(module)
    import_module("cloudai_mbridge.training.process.provenance").package_versions()  # whatever is installed later
    gc.freeze()  # imported modules stay
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)  # OpenBLAS ends its threads before a fork
    return not import_module("torch").cuda.is_available() and len(os.listdir("/proc/self/task")) == 1


def _become(connection: socket.socket) -> list[str]:
    """Become a process of the job; another one waits for it and sends the exit code. Return its command."""
    with suppress(OSError, EOFError):
        _check_peer(connection)
        for target, descriptor in enumerate(socket.recv_fds(connection, 1, 3)[1]):
            os.dup2(descriptor, target)
            os.close(descriptor)
        client = Connection(connection.detach())
        command, environment, process.ORIGINAL_DIR = client.recv()  # type: ignore[attr-defined]
        os.chdir(process.ORIGINAL_DIR)  # type: ignore[attr-defined]  # the first directory of a spawned process
        os.environ.clear()
        os.environ.update(environment)
        _show(command)
        if pid := os.fork():
            client.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):  # not ignored, even under nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        client.send(os.getpid())
        client.recv()  # it is there: a job's end finds it or, by its mark, this process
        client.close()
        return list(command)
    os._exit(1)


def _show(command: list[str]) -> None:
    """Change command line and mark in /proc, which stay the server's after a fork."""
    start, end, place = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:48])
    ctypes.memmove(start, b"\0".join(map(os.fsencode, command)).ljust(end - start, b"\0"), end - start - 1)
    shown, mark = Path("/proc/self/environ"), f"{LOCAL_JOB_VARIABLE}={os.environ[LOCAL_JOB_VARIABLE]}".encode()
    ctypes.memmove(place + shown.read_bytes().index(mark[: len(LOCAL_JOB_VARIABLE) + 1]), mark, len(mark))
    if mark not in shown.read_bytes().split(b"\0"):
        raise OSError("the mark of the job cannot be changed")
