"""Start, recognise and end the sandbox's daemons; also those that another process started."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.sandbox.node import descendants

# Set for every daemon to the sandbox's directory.  Slurm gives a job its client's environment, not the daemon's, so
# no job and no user's shell has it.
MARKER = "MBRIDGE_SANDBOX"

# These overwrite their environment and keep only SLURM_CONF of it.
UNMARKED_DAEMONS = ("slurmstepd", "slurmscriptd")


@dataclass(frozen=True)
class Process:
    """Identify a process for good: pids are used again, the pair with the start time is not."""

    pid: int
    start_time: int  # clock ticks since boot, /proc/PID/stat field 22


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # from field 3, the state, on


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def is_alive(process: Process) -> bool:
    """Tell whether the process still runs; reap it if it is a dead child of this one."""
    fields = _stat(process.pid)
    if fields is None or int(fields[19]) != process.start_time:
        return False
    if fields[0] != "Z":
        return True
    with suppress(ChildProcessError):  # another process's to reap
        os.waitpid(process.pid, os.WNOHANG)
    return False


def spawn(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path, die_with_parent: bool = False
) -> Process:
    """Start a daemon in a session of its own, its output appended to `log`.

    With `die_with_parent` it gets SIGTERM when the calling *thread* ends (prctl(2), PR_SET_PDEATHSIG).
    """
    if die_with_parent:
        # setpriv and not preexec_fn, which may deadlock a parent that has threads
        argv = ["setpriv", "--pdeathsig", "TERM", "--", *argv]
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=env, start_new_session=True
        )
    process = identify(child.pid)
    assert process is not None  # at worst a zombie: only is_alive reaps it
    # The state file says from now on what runs; this keeps Popen from warning about a child that outlives it.
    child.returncode = 0
    return process


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def send(process: Process, number: signal.Signals) -> None:
    """Signal a process, unless it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[Process], timeout_s: float = 10.0) -> None:
    """Ask the processes to stop, kill those that do not, and wait until all are gone."""
    left = [process for process in processes if is_alive(process)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            send(process, number)
        if wait_until(lambda: not any(is_alive(process) for process in left), timeout_s):
            return


def kill_tree(roots: Iterable[Process], timeout_s: float = 5.0) -> None:
    """Kill processes and all their descendants, and wait until they are gone."""
    tops = [process for process in roots if is_alive(process)]
    below = (identify(pid) for pid in descendants(process.pid for process in tops))
    doomed = [*tops, *(process for process in below if process)]
    for process in doomed:
        send(process, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(process) for process in doomed), timeout_s)


def kill_strays(directory: Path, timeout_s: float = 10.0) -> None:
    """Kill what belongs to a sandbox by its environment, until there is nothing left.

    This reaches what the state file and the supervisors do not: a daemon whose starter died before it wrote it down,
    and the steps of a node whose supervisor was killed.  A user's shell that only points to the sandbox is not a stray.
    """

    def is_clean() -> bool:
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        mine = (identify(pid) for pid in pids if pid != os.getpid() and _belongs(pid, directory))
        strays = [process for process in mine if process and is_alive(process)]
        kill_tree(strays)
        return not strays

    wait_until(is_clean, timeout_s)


def _belongs(pid: int, directory: Path) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # gone, or another user's
        return False
    if os.fsencode(f"SLURM_CONF={directory}/slurm.conf") not in environ:
        return False
    is_daemon = os.fsencode(f"{MARKER}={directory}") in environ or name in UNMARKED_DAEMONS
    return is_daemon or any(variable.startswith(b"SLURMD_NODENAME=") for variable in environ)
