"""Every submission, a line each, on disk before it is made: what is known of jobs if the journal is lost.

The journal says more, but it is one file that a copy, a full disk or a hand can take away while its jobs run.
"""

import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.launch.claim import SIXTEEN_HEX
from cloudai_mbridge.plan import ROOT_FILES

_MOST_ATTEMPTS = 1 << 31


@dataclass(frozen=True)
class LoggedAttempt:
    """An attempt as the log has it. host: of the process that submitted it, "" if the log does not say.

    is_doubtful: it was given up without proof that nothing was submitted.
    """

    key: str
    number: int
    token: str
    host: str = ""
    is_withdrawn: bool = False
    is_doubtful: bool = False


class SubmissionLog:
    """The log of a run."""

    def __init__(self, root: Path) -> None:
        self._path = root / ROOT_FILES.submissions
        self._is_whole = False

    def submitting(self, token: str, attempts: Iterable[tuple[str, int]]) -> None:
        """Write down what is about to be submitted.

        Raises:
            OSError: it cannot be written; nothing may be submitted then.
        """
        self._append({"token": token, "host": socket.gethostname(), "attempts": list(attempts)})

    def withdrawn(self, token: str, keys: Iterable[str], *, is_doubtful: bool) -> None:
        """Write down that attempts were given up, since nothing seems to have been submitted."""
        self._append({"token": token, "withdrawn": list(keys), "is_doubtful": is_doubtful})

    def read(self) -> list[LoggedAttempt]:
        """Return the attempts in the order in which they were submitted; a damaged line is passed over.

        Raises:
            OSError: it cannot be read, or it is not a file.
        """
        attempts: dict[tuple[str, str], LoggedAttempt] = {}
        for line in filter(None, self._lines()):
            token = line["token"]
            for key, number in line.get("attempts", ()):
                attempts[token, key] = LoggedAttempt(key, number, token, line.get("host", ""))
            for key in line.get("withdrawn", ()):
                if (known := attempts.get((token, key))) is not None:
                    is_doubtful = bool(line.get("is_doubtful"))
                    attempts[token, key] = replace(known, is_withdrawn=True, is_doubtful=is_doubtful)
        return list(attempts.values())

    def damaged_line(self) -> int | None:
        """Return the number, from 1, of a line that cannot be read; a cut last one was never submitted."""
        return next((number for number, line in enumerate(self._lines(), 1) if line is None), None)

    def _lines(self) -> Iterator[dict[str, Any] | None]:
        """Yield the lines, None for a damaged one; without a last one that was cut."""
        *lines, last = self._content().split(b"\n")
        yield from map(_parsed, lines)
        if (data := _parsed(last)) is not None:
            yield data

    def _content(self) -> bytes:
        try:
            return read_regular(self._path)
        except FileNotFoundError:
            return b""

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            if not self._is_whole:
                self._complete(file)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _complete(self, file: BinaryIO) -> None:
        """End the last line, or take it away if it was cut."""
        content = self._content()
        last = content.rpartition(b"\n")[2]
        if _parsed(last) is not None:
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))
        self._is_whole = True


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if _is_well_formed(data) else None


def _is_well_formed(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and isinstance(data.get("token"), str)
        and re.fullmatch(SIXTEEN_HEX, data["token"]) is not None
        and isinstance(data.get("host", ""), str)
        and isinstance(data.get("attempts", []), list)
        and all(map(_is_attempt, data.get("attempts", [])))
        and isinstance(data.get("withdrawn", []), list)
        and all(isinstance(key, str) for key in data.get("withdrawn", []))
    )


def _is_attempt(item: Any) -> bool:
    if not (isinstance(item, list) and len(item) == 2):
        return False
    key, number = item
    return isinstance(key, str) and type(number) is int and 0 < number < _MOST_ATTEMPTS
