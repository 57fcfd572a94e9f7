"""The last lines of a log: of a failed run, and for `mbridge logs`."""

import re
import time
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.regular import NotRegular, data_ranges, is_empty, open_regular, pass_hole
from cloudai_mbridge.training.credentials.scrub import redacted_lines
from cloudai_mbridge.training.process.log_lines import RUN_MARK, STEP_MARK

_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 20
_FOLLOW_S = 0.5
# torchrun names the failed rank and its error, and then reports at length on itself
# With the label of its rank; another rank may have written before it on the same line
_RECORD = re.compile(rf"(?:^(?: {{0,5}}\d{{1,6}}:|\[[\w-]{{1,40}}\]:))?\s*(?:{RUN_MARK}|{STEP_MARK}) \{{.*")
_NOISE = re.compile(
    r"\*{10,}$|/run\.py:\d+\]$|Setting OMP_NUM_THREADS environment variable for each process"
    r"|absl(?:::InitializeLog|\.logging is not installed|\.logging)|^WARNING: All log messages before absl"
    r"|Setting rerun_state_machine\.\w+ to |destroy_process_group\(\) was not called"
    r"|Received (?:2|15|Signals\.\w+) death signal|Sending process \d+ closing signal SIG"
)
# How torchrun ends when its job is ended: by mbridge or by Slurm, and for another reason
_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: \d+\s*$")
_TRACEBACK = "Traceback (most recent call last):"
_OF_TRACEBACK = re.compile(r"^\s+|^During handling of|^The above exception")
_RANK_FAILED = re.compile(r"\] failed \(exitcode: -?\d+\) local_rank: \d+")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines that are not blank, from the last 64 KiB; control characters are made visible, and possible
    credentials are redacted. A log that cannot be read has no lines.

    Left out: the loop's records, which are machine-readable; torchrun's output on itself, after the name of the first
    failed rank or because it was told to end; warnings that every run prints.
    """
    try:
        with open_regular(path) as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _BLOCK))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    found = (_RECORD.sub("", printable(line.rstrip())) for line in text.splitlines())
    lines = [line for line in redacted_lines("\n".join(found)) if line and not _NOISE.search(line)]
    lines = _without_signals(lines)
    end = next((i + 1 for i, line in enumerate(lines) if _RANK_FAILED.search(line)), len(lines))
    return lines[:end][-count:]


def _without_signals(lines: list[str]) -> list[str]:
    """Return lines without tracebacks that a signal caused."""
    kept: list[str] = []
    for line in lines:
        kept.append(line)
        if _SIGNALLED.search(line):
            kept.pop()
            while kept and _OF_TRACEBACK.match(kept[-1]):
                kept.pop()
            if kept and kept[-1].endswith(_TRACEBACK):
                kept.pop()
    return kept


def printable(line: str) -> str:
    """Make control characters visible."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)


def tail_lines(path: Path, count: int | None, *, follow: bool) -> Iterator[str]:
    """Yield the last `count` lines of a log, all if None, then with `follow` the lines added to it, without end.

    A line longer than 1 MiB comes in pieces of about that size: time is linear in the log's size, memory is bounded.
    """
    while follow and not path.exists():
        time.sleep(_FOLLOW_S)
    try:
        file = open_regular(path)
    except FileNotFoundError:
        raise BadInput(f"{path}: does not exist; the run has not started") from None
    except NotRegular as error:
        raise BadInput(f"{path}: is {error.strerror}; it cannot be shown") from None
    with file:
        if count is not None:
            _seek_to_last(file, count)
        rest: list[bytes] = []
        while (block := file.read(_BLOCK)) or follow:
            if not block:
                time.sleep(_FOLLOW_S)
            elif is_empty(block):
                pass_hole(file)
                continue
            first, *others = block.split(b"\n")
            rest.append(first)
            for line in others:
                yield _as_text(rest)
                rest = [line]
            if sum(map(len, rest)) >= _LONGEST_LINE:
                yield _as_text(rest)
                rest = []
        if any(rest):
            yield _as_text(rest)


def _as_text(pieces: Iterable[bytes]) -> str:
    return printable(b"".join(pieces).decode("utf-8", errors="replace").rstrip("\r"))


def _seek_to_last(file: BufferedReader, count: int) -> None:
    """Seek to the beginning of the last `count` lines."""
    end = file.seek(0, 2)
    file.seek(max(0, end - 1))
    breaks = -1 if file.read(1) == b"\n" else 0  # a final line break closes the last line
    if count == 0:
        return
    for start, stop in reversed(data_ranges(file)):
        for block_at in range(stop - 1 - (stop - 1 - start) % _BLOCK, start - 1, -_BLOCK):
            file.seek(block_at)
            block = file.read(min(_BLOCK, stop - block_at))
            at = len(block)
            while breaks < count and (at := block.rfind(b"\n", 0, at)) >= 0:
                breaks += 1
            if breaks == count:
                file.seek(block_at + at + 1)
                return
    file.seek(0)
