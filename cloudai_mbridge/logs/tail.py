"""The last lines of a log, as evidence."""

import re
from pathlib import Path

from cloudai_mbridge.files.regular import open_regular
from cloudai_mbridge.training.credentials import redacted_lines

_BLOCK = 1 << 16
# torchrun says which rank failed and how, and then reports at length on itself
_RANK_FAILED = re.compile(r"\] failed \(exitcode: -?\d+\) local_rank: \d+")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines that are not blank, from the last 64 KiB; control characters are made visible, and what
    looks like a credential is redacted. A log that cannot be read has none.

    What torchrun writes after naming the first failed rank is about torchrun and is left out.
    """
    try:
        with open_regular(path) as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _BLOCK))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line for line in redacted_lines("\n".join(printable(line.rstrip()) for line in text.splitlines())) if line]
    end = next((i + 1 for i, line in enumerate(lines) if _RANK_FAILED.search(line)), len(lines))
    return lines[:end][-count:]


def printable(line: str) -> str:
    """Make control characters visible."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
