"""CloudAI's reading of a Megatron-Bridge log: the last ten pairs of step time and TFLOP/s per GPU.

Kept as the reference has it on well-formed logs. On others: a number in scientific notation, a sign or a NaN is no
match; of two records on a line the first counts, and if it is torn behind its step time, that time pairs with the
second record's TFLOP/s; a record cut in half by the end of a line or of the file is lost; bytes that are not UTF-8 and
NUL bytes are skipped over; CRLF ends a line as LF does.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.logs.parser import match_step_time

KEPT = 10
_LONGEST_LINE = 1 << 20


def extract_mbridge_metrics(text: str) -> tuple[list[float], list[float]]:
    """Return (step times in s, TFLOP/s per GPU) of the last ten records, aligned."""
    return _last(text.splitlines())


def stream_mbridge_metrics(path: Path) -> tuple[list[float], list[float]]:
    """Return the same of a file of any size; memory does not grow with it."""
    return _last(_lines(path))


def _last(lines: Iterable[str]) -> tuple[list[float], list[float]]:
    pairs = deque((pair for line in lines if (pair := match_step_time(line)) is not None), maxlen=KEPT)
    return [time for time, _ in pairs], [tflops for _, tflops in pairs]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that may hold a record; looking for bytes first is many times faster than decoding them all."""
    rest = b""
    with open_regular(path) as log:
        for chunk in read_chunks(log):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            yield from (line.decode("utf-8", errors="replace") for line in lines if b"TFLOP" in line.upper())
    yield rest.decode("utf-8", errors="replace")
