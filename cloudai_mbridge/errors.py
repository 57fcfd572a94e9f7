"""Errors of mbridge, and the exit code of each branch.

Points that ran and failed are results, not exceptions: `mbridge run` then exits with POINTS_FAILED. An interrupted run
exits with 128 + the signal's number.
"""

OK = 0
POINTS_FAILED = 1

_LONGEST_LINE = 1200
_MOST_LINES = 100


def shortened(text: str) -> str:
    """Return a message of readable length: of long lines the beginning and the end, of many lines the first."""

    def cut(line: str) -> str:
        if len(line) <= _LONGEST_LINE:
            return line
        start, end = line[: _LONGEST_LINE * 2 // 3], line[-_LONGEST_LINE // 3 :]
        return f"{start} ... ({len(line) - len(start) - len(end)} characters left out) ... {end}"

    lines = text.splitlines()
    more = [f"... and {len(lines) - _MOST_LINES} more lines like these"] if len(lines) > _MOST_LINES else []
    return "\n".join([*map(cut, lines[:_MOST_LINES]), *more])


class MBridgeError(Exception):
    """Base class of errors shown to the user as one line; messages that are too long are cut."""

    exit_code = 3

    def __str__(self) -> str:
        return shortened(super().__str__())


class BadInput(MBridgeError):
    """The user's files or options are wrong. The message names the file, line or key, the value and the remedy."""

    exit_code = 2


class NotModelled(BadInput):
    """An estimate has no model of a part: nothing is said about the point, which may be right."""


class InUse(BadInput):
    """Another process holds the run: wait for it, or cancel it. Nothing was written."""

    exit_code = 5


class NothingRan(BadInput):
    """The directory is of a dry run, or of a run that failed before its plan was complete: nothing was submitted."""

    exit_code = 6


class Damaged(BadInput):
    """A file of a run, or a history, is corrupt. The message names the place."""

    exit_code = 7


class OtherVersion(BadInput):
    """A file of a run's directory has a format that this mbridge does not read."""

    exit_code = 8


class NothingFits(BadInput):
    """No layout of a model fits into the memory of so many GPUs, by the estimate."""

    exit_code = 9


class NonePromoted(BadInput):
    """The baseline file says that none has been promoted yet, and the day until which one must be has not passed."""

    exit_code = 17


class NothingFailed(BadInput):
    """A run whose failed points were to run again has none. Nothing was submitted."""

    exit_code = 18


class ToolFailure(MBridgeError):
    """The tool could not do its work although the input is right: Slurm is unreachable, the disk full, no torch."""

    exit_code = 3


class Paused(MBridgeError):
    """The scheduler was silent for too long. Jobs may still run; nothing is lost, and `mbridge resume` goes on."""

    exit_code = 4


def shown(value: object, most: int = 80) -> str:
    """Return a value for a message: as Python writes it, cut when it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(number: int, noun: str) -> str:
    """Return "1 point" or "2 points"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
