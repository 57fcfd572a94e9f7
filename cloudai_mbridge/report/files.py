"""Write a report's files: whole, or not at all."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.launch.disk import naming


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; what stands there takes `path`'s place once it is complete.

    Readers see the old file or the new one. Where writing fails, the old one stays.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")  # a name that no link can wait under
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, line ends as they are; what UTF-8 cannot say is written as an escape such as \\udcff."""
    with naming(path), replacing(path) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", errors="backslashreplace"))
