"""What can go wrong, and the exit code of each branch.

    MBridgeError
    ├── BadInput         2   the user's files or options: nothing was submitted
    ├── ToolFailure      3   the tool or its environment: Slurm unreachable, disk full, no torch
    └── Paused           4   mbridge ended and its jobs did not: to be resumed

Points that ran and failed are results, not exceptions: `mbridge run` then exits with POINTS_FAILED. An interrupted run
exits with 128 + the signal's number.
"""

OK = 0
POINTS_FAILED = 1


class MBridgeError(Exception):
    """Base of the errors that a user sees as one line."""

    exit_code = 3


class BadInput(MBridgeError):
    """The input is wrong. The message names the file, line or key, the value and the remedy."""

    exit_code = 2


class ToolFailure(MBridgeError):
    """The tool could not do its work although the input is right."""

    exit_code = 3


class Paused(MBridgeError):
    """The scheduler was silent for too long. Jobs may still run; nothing is lost, and `mbridge resume` goes on."""

    exit_code = 4


def counted(number: int, noun: str) -> str:
    """Return "1 point" or "2 points"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
