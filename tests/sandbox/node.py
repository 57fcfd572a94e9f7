"""Supervise one node: slurmd, and everything it ever started.

slurmstepd daemonizes, outlives slurmd and overwrites its own environment, so neither process groups nor the parent
find it again.  A child subreaper (prctl(2)) does: whatever a node's processes leave behind becomes its child.

Run by file path with `python -I -S` (standard library only), inside the node's namespaces:

    node.py PARENT_PID STATUS_FILE SLURMD [ARGUMENT ...]

PARENT_PID is the process to die with, 0 for none.  STATUS_FILE always holds one word: up, down (slurmd is dead, its
steps go on) or crashed.  Signals are the remote control:

    SIGUSR1  crash: kill everything at once         SIGUSR2  kill slurmd only
    SIGHUP   start slurmd again                     SIGTERM  stop slurmd, kill the rest, exit
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

UP, DOWN, CRASHED = "up", "down", "crashed"
CRASH, KILL_SLURMD, REVIVE, STOP = signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
SLURMD_STOP_S = 2.0  # how long slurmd may take to stop by itself
KILL_S = 5.0  # how long killed processes may take to vanish

# slurmctld counts in whole seconds.  It notices a reboot only if it lies in a later second than the node's last answer,
# which it may note down late; and a new slurmd can be told from the old one only by its start time.
REBOOT_S = 2.0
RELAUNCH_S = 1.5


def children_by_parent() -> dict[int, list[int]]:
    """Return the living processes of this machine, zombies left out, by their parent's pid."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except OSError:  # gone in the meantime
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    return children


def descendants(roots: Iterable[int]) -> list[int]:
    """List the living children, grandchildren, ... of the given processes."""
    children, found, todo = children_by_parent(), list[int](), list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Node:
    """Keep one slurmd and all it started below this process."""

    def __init__(self, slurmd: list[str], status_file: Path) -> None:
        self.argv = slurmd
        self.status_file = status_file
        self.status = DOWN
        self.slurmd: int | None = None
        self.next_launch = 0.0  # no earlier than this, on the monotonic clock

    def set_status(self, status: str) -> None:
        """Publish the node's status, in one piece."""
        self.status = status
        draft = self.status_file.with_suffix(".tmp")
        draft.write_text(status)
        draft.replace(self.status_file)

    def launch(self) -> None:
        """Start slurmd, if it is not running."""
        if self.slurmd is None:
            time.sleep(max(0.0, self.next_launch - time.monotonic()))
            # -b reports a boot; without it slurmctld believes that the steps of before are still running
            argv = [*self.argv, "-b"] if self.status == CRASHED else self.argv
            self.slurmd = os.posix_spawn(argv[0], argv, os.environ, setsigmask=())
            self.next_launch = time.monotonic() + RELAUNCH_S
        self.set_status(UP)

    def reap(self) -> None:
        """Collect dead children, and notice when slurmd is among them."""
        try:
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid == self.slurmd:
                    self.slurmd = None
                    self.set_status(DOWN)
        except ChildProcessError:  # none left
            pass

    def signal_slurmd(self, number: signal.Signals, timeout_s: float) -> None:
        """Signal slurmd and wait until it is gone."""
        if self.slurmd is None:
            return
        os.kill(self.slurmd, number)
        end = time.monotonic() + timeout_s
        while self.slurmd is not None and time.monotonic() < end:
            time.sleep(0.01)
            self.reap()

    def kill_all(self) -> None:
        """Kill everything below this process, again and again until no new child appears."""
        end = time.monotonic() + KILL_S
        while (pids := descendants([os.getpid()])) and time.monotonic() < end:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):  # gone; or another user's, by sudo inside a job
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            self.reap()

    def crash(self) -> None:
        """Lose power: slurmd, its steps and their tasks are gone at once."""
        self.kill_all()
        self.reap()
        self.next_launch = time.monotonic() + REBOOT_S
        self.set_status(CRASHED)

    def stop(self) -> None:
        """Stop slurmd in its own way, then kill what is left."""
        self.signal_slurmd(signal.SIGTERM, SLURMD_STOP_S)
        self.kill_all()

    def obey(self, number: int) -> bool:
        """Act on a signal; return whether to go on."""
        self.reap()  # for SIGCHLD, all there is to do
        if number == CRASH:
            self.crash()
        elif number == KILL_SLURMD:
            self.signal_slurmd(signal.SIGKILL, KILL_S)
        elif number == REVIVE:
            self.launch()
        elif number == STOP:
            self.stop()
            return False
        return True


def main(parent: int, status_file: Path, slurmd: list[str]) -> None:
    """Run the node until a signal ends it."""
    # Blocked before anything can send one: a signal waits for sigwait and is never lost.
    signals = {CRASH, KILL_SLURMD, REVIVE, STOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if parent:
        libc.prctl(PR_SET_PDEATHSIG, int(STOP), 0, 0, 0)
        if os.getppid() != parent:  # died before the line above
            return
    node = Node(slurmd, status_file)
    node.launch()
    while node.obey(signal.sigwait(signals)):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
