"""The fork server: `python -m ... OWNER DESCRIPTOR ROOM`, with a listening socket; it ends with its owner.

For each job it forks a process that forks another one, which becomes torchrun, and waits for it. Neither needs the
server again. Before the first fork, nothing has started a thread or initialized CUDA: a server that has ends.
"""

import atexit
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
import weakref
from multiprocessing import process
from typing import Any

from cloudai_mbridge.training.one_machine import launch, resolve_no_name
from cloudai_mbridge.training.process.log_lines import LOCAL_JOB_VARIABLE
from cloudai_mbridge.training.warm_start.client import peer_uid
from cloudai_mbridge.training.warm_start.kernel import process_id, show

_IMPORT_S = 600
_IDLE_S = 60.0
_LOOK_S = 5.0
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def main() -> None:
    """Serve; what was forked goes on from here, so that it ends as any interpreter does."""
    atexit.register(_skip_teardown)  # the first one, so it runs after all others
    owner, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    owner_fd = _open(owner)
    resolve_no_name()
    signal.alarm(_IMPORT_S)  # one that hangs, in a file system, ends
    gc.disable()  # what is imported stays: looking through it for garbage is a fifth of the time
    _import()
    gc.freeze()
    gc.enable()
    signal.alarm(0)
    if not _is_fit_to_fork():
        return
    connection = _serve(listener, owner_fd)
    if connection is None:
        return
    os.close(owner_fd)
    listener.close()
    try:
        request = _take(connection)
        _lead(connection)
    except (OSError, ValueError):  # the job has ended, or /proc cannot be changed: then it starts without this server
        os._exit(1)
    connection.close()
    try:
        _train(request)
    except SystemExit as end:
        _Ending.is_good = not end.code
        raise
    _Ending.is_good = True


class _Ending:
    is_good = False


def _skip_teardown() -> None:
    """End without freeing everything that was imported, which takes as long as a few steps."""
    if _Ending.is_good:
        for each in gc.get_objects():
            if issubclass(type(each), _WRITERS) and not each.closed:
                each.flush()
        os._exit(0)


def _open(owner: str) -> int:
    """Return a descriptor that is readable when the owner has ended. OSError: it has."""
    pid = int(owner.partition(".")[0])
    descriptor = os.pidfd_open(pid)
    if process_id(pid) != owner:
        raise ProcessLookupError(owner)
    return descriptor


def _import() -> None:
    warnings.filterwarnings("ignore", message=".*not installed. Falling back.*")
    from cloudai_mbridge.training.cpu import import_megatron

    import_megatron()
    import torch._dynamo  # torch's optimizers do
    import torch.distributed.run  # noqa: F401

    import cloudai_mbridge.training.config.text.overrides
    import cloudai_mbridge.training.finetune
    import cloudai_mbridge.training.gpt_step
    import cloudai_mbridge.training.warm_start.ranks  # noqa: F401
    from cloudai_mbridge.training.process.provenance import package_versions

    package_versions()  # of what was imported now, whatever is installed later
    _keep_operators()


def _keep_operators() -> None:
    """Have no process remove torch's operators one by one, or import what prints compile times, when it ends."""
    from torch._dynamo.utils import compile_times
    from torch.library import _del_library

    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = each.peek()
        if found is not None and found[1] is _del_library:
            each.atexit = False
    compile_times(repr="str", aggregate=True)


def _is_fit_to_fork() -> bool:
    import torch

    if torch.cuda.is_available():
        return False
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1  # OpenBLAS ends its threads before a fork


def _serve(listener: socket.socket, owner_fd: int) -> socket.socket | None:
    """Fork for every connection, and return it there; None when the owner has ended, or was idle for long."""
    children: set[int] = set()
    waits = select.poll()
    for descriptor in (listener.fileno(), owner_fd):
        waits.register(descriptor, select.POLLIN)
    last_used = time.monotonic()
    while children or time.monotonic() - last_used < _IDLE_S:
        ready = [descriptor for descriptor, _ in waits.poll(_LOOK_S * 1e3)]
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if owner_fd in ready:
            break
        if children or ready:
            last_used = time.monotonic()
        if ready:
            connection, _ = listener.accept()
            if (pid := os.fork()) == 0:
                return connection
            children.add(pid)
            connection.close()
    return None


def _take(connection: socket.socket) -> dict[str, Any]:
    """Become a process of the job that asks: its files, directory, environment and mark."""
    if peer_uid(connection) != os.getuid():
        os._exit(1)
    os.setpgid(0, 0)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    with connection.makefile() as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    os.umask(request["umask"])
    os.chdir(request["directory"])
    process.ORIGINAL_DIR = request["directory"]  # type: ignore[attr-defined]  # where a spawned process begins
    os.environ.clear()
    os.environ.update(request["environment"])
    if not sys.flags.safe_path:
        sys.path[0] = request["directory"]
    sys.argv = ["one_machine", *request["arguments"]]
    command = [sys.executable, "-m", "cloudai_mbridge.training.one_machine", *request["arguments"]]
    show(command, LOCAL_JOB_VARIABLE, os.environ[LOCAL_JOB_VARIABLE])
    return request


def _lead(connection: socket.socket) -> None:
    """Fork, and return in the new process; the other one waits for it and tells how it ended.

    Only now does the client say that it is still there. Whoever ends the job finds either the client or, by its mark,
    this process.
    """
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(f"{code}\n".encode())
        os._exit(0)
    connection.sendall(f"{os.getpid()}\n".encode())
    if not connection.recv(1):
        raise ConnectionAbortedError


def _train(request: dict[str, Any]) -> None:
    from cloudai_mbridge.training.warm_start.ranks import become, waiting_ranks

    if (order := waiting_ranks(request["num_ranks"])) is not None:
        become(order)
    else:
        launch(request["arguments"])


if __name__ == "__main__":
    main()
