"""The last lines of a log, as evidence."""

from pathlib import Path

_BLOCK = 1 << 16


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines that are not blank, from the last 64 KiB; control characters are made visible."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _BLOCK))
            text = log.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [_printable(line.rstrip()) for line in text.splitlines()]
    return [line for line in lines if line][-count:]


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
