"""Have a fork server run the ranks of this machine. Standard library only."""

import contextlib
import hashlib
import json
import os
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from cloudai_mbridge.training.compat.machine import GPU_DRIVERS
from cloudai_mbridge.training.process.hang import TIMEOUT_VARIABLE
from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE
from cloudai_mbridge.training.warm_start.kernel import process_id

# Asks for a warm start. PID.START.SECRET: the servers end with this process; the secret is in their addresses.
WARM_START_VARIABLE = "MBRIDGE_WARM_START"
# Of a job alone: read when it runs, never while something is imported. In all others, job and server are equal.
_OF_A_JOB = {LOCAL_JOB_VARIABLE, TIMEOUT_VARIABLE, "PWD", "OLDPWD", "SHLVL", "_"}
_OPTIONS_OF_TORCHRUN = "PET_"
_CUSTOMIZE = ("sitecustomize", "usercustomize")


def wanted(owner: int) -> dict[str, str]:
    """Return the variable by which jobs ask for a warm start, from servers that end with the process `owner`."""
    try:
        return {WARM_START_VARIABLE: f"{process_id(owner)}.{secrets.token_hex(16)}"}
    except OSError:  # no /proc
        return {}


def run(arguments: Sequence[str]) -> int | None:
    """Run `one_machine ARGUMENT ...` in processes of a server, and return its exit code, negative for a signal.

    None: nothing was started, and it has to be done in this process. That is so if it was not asked for, and where it
    is not possible: CUDA does not survive a fork.
    """
    asked = os.environ.pop(WARM_START_VARIABLE, "")
    num_ranks = _num_ranks(arguments)
    if not asked or num_ranks is None or LOCAL_JOB_VARIABLE not in os.environ or any(map(os.path.exists, GPU_DRIVERS)):
        return None
    if any(map(_is_own, _CUSTOMIZE)):
        return None
    owner, _, secret = asked.rpartition(".")
    try:
        with _connect(owner, secret, _environment_of_server(num_ranks)) as connection:
            return _run(connection, arguments, num_ranks)
    except OSError:
        return None


def _is_own(module: str) -> bool:
    """Return whether a module that Python imports at its start is the user's: it may ask which rank it is in."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and Path(file).parent != Path(os.__file__).parent


def _num_ranks(arguments: Sequence[str]) -> int | None:
    """Return how many ranks torchrun would start, None if it has options that a server does not know."""
    option, number, *_ = (*arguments, "", "")
    has_options = any(name.startswith(_OPTIONS_OF_TORCHRUN) for name in os.environ)
    return int(number) if option == "--nproc-per-node" and number.isdecimal() and not has_options else None


def _environment_of_server(num_ranks: int) -> dict[str, str]:
    """Return what the ranks will find when they start; libraries read it when they are loaded."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    if num_ranks > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return {**env, LOCAL_JOB_VARIABLE: "-" * len(os.environ[LOCAL_JOB_VARIABLE])}


def _connect(owner: str, secret: str, env: Mapping[str, str]) -> socket.socket:
    """Connect to the server of an owner and an environment; start it unless it runs. OSError: it is another user's."""
    address = "\0mbridge-" + _digest(secret, [owner, sys.executable, sorted(env.items()), *_limits()])
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:
            pass  # it runs
        else:
            listener.listen()
            _start(listener, owner, env)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    if peer_uid(connection) != os.getuid():
        raise PermissionError(address)
    return connection


def _digest(secret: str, parts: Sequence[object]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), key=secret.encode(), digest_size=16).hexdigest()


def _limits() -> list[object]:
    """Return what a server keeps of the job that started it."""
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return [sorted(os.sched_getaffinity(0)), [resource.getrlimit(getattr(resource, name)) for name in limits]]


def _start(listener: socket.socket, owner: str, env: Mapping[str, str]) -> None:
    """Start a server. It outlives this job, so it has nothing of it; not in the job's directory, which may go."""
    room = " " * 256  # for the command lines of torchrun and the ranks
    subprocess.Popen(
        [sys.executable, "-u", "-m", f"{__package__}.server", owner, str(listener.fileno()), room],
        cwd="/",
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
        start_new_session=True,
    )


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _run(connection: socket.socket, arguments: Sequence[str], num_ranks: int) -> int | None:
    """Send the request, and wait for the end. The other end answers twice: with its process id, and an exit code."""
    os.umask(umask := os.umask(0))
    request = {
        "arguments": list(arguments),
        "num_ranks": num_ranks,
        "directory": str(Path.cwd()),
        "environment": dict(os.environ),
        "umask": umask,
    }
    socket.send_fds(connection, [b"\n"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    with connection.makefile() as answers:
        if not (pid := answers.readline().strip()):
            return None  # nothing was started
        connection.sendall(b"\n")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: _forward(number, int(pid)))
        return _code(answers)


def _forward(number: int, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _code(answers: TextIO) -> int:
    try:
        return int(answers.readline())
    except (OSError, ValueError):
        return -signal.SIGKILL  # what waits for the exit code was killed
