"""Log of submissions, one line each, on disk before the submission: used to find the jobs if the journal is lost.

The journal contains more, but it is a single file that a copy, a full disk or a user can remove while its jobs run.
"""

import contextlib
import json
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.launch.claim import SIXTEEN_HEX
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.runner.journal.rows import JournalEntry

_MOST_ATTEMPTS = 1 << 31


@dataclass(frozen=True)
class LoggedAttempt:
    """An attempt as the log has it.

    host: of the process that submitted it, root: the run's directory at that time; "" if the log does not tell.
    is_doubtful: it was given up without proof that nothing was submitted.
    """

    key: str
    number: int
    token: str
    host: str = ""
    root: str = ""
    is_withdrawn: bool = False
    is_doubtful: bool = False


class _Line(BaseModel):
    """One line: attempts (key, number) that are about to be submitted under a token, or keys that were withdrawn."""

    model_config = ConfigDict(strict=True)

    token: Annotated[str, Field(pattern=rf"\A{SIXTEEN_HEX}\z")]
    host: str = ""
    root: str = ""
    attempts: list[tuple[str, Annotated[int, Field(gt=0, lt=_MOST_ATTEMPTS)]]] = []
    withdrawn: list[str] = []
    is_doubtful: Any = False


class SubmissionLog:
    """The log of a run."""

    def __init__(self, root: Path) -> None:
        self._path = root / ROOT_FILES.submissions
        self._is_whole = False

    def submitting(self, token: str, attempts: Iterable[tuple[str, int]]) -> None:
        """Record an imminent submission. OSError: it cannot be written; nothing may be submitted then."""
        place = {"host": socket.gethostname(), "root": str(self._path.parent.resolve())}
        self._append({"token": token, **place, "attempts": list(attempts)})

    def withdrawn(self, token: str, keys: Iterable[str], *, is_doubtful: bool) -> None:
        """Record that attempts were given up, since apparently nothing was submitted."""
        self._append({"token": token, "withdrawn": list(keys), "is_doubtful": is_doubtful})

    def read(self) -> list[LoggedAttempt]:
        """Return the attempts in the order of submission; damaged lines are skipped.

        OSError: it cannot be read, or it is not a file.
        """
        attempts: dict[tuple[str, str], LoggedAttempt] = {}
        for line in filter(None, self._lines()):
            token = line.token
            for key, number in line.attempts:
                attempts[token, key] = LoggedAttempt(key, number, token, line.host, line.root)
            for key in line.withdrawn:
                if (known := attempts.get((token, key))) is not None:
                    attempts[token, key] = replace(known, is_withdrawn=True, is_doubtful=bool(line.is_doubtful))
        return list(attempts.values())

    def moved_from(self, attempt: LoggedAttempt) -> Path | None:
        """Return the run's directory at the time an attempt was submitted; None if it has not moved."""
        there = Path(attempt.root)
        with contextlib.suppress(OSError):
            if not attempt.root or there.samefile(self._path.parent):
                return None
        return there

    def original_of(self, tokens: Collection[str]) -> Path | None:
        """Return the directory that this one is a copy of, if it still exists. tokens: of unfinished attempts."""
        for attempt in self.read():
            there = self.moved_from(attempt) if attempt.token in tokens else None
            if there is not None and any(attempt.token == own.token for own in SubmissionLog(there).read()):
                return there
        return None

    def proves_loss(self, entries: Iterable[JournalEntry]) -> bool:
        """Return whether a journal has no attempt although some were submitted: it was emptied, or replaced."""
        return not any(entry.attempts for entry in entries) and any(not each.is_withdrawn for each in self.read())

    def damaged_line(self) -> int | None:
        """Return the number, from 1, of an unreadable line; a truncated last line was never submitted."""
        return next((number for number, line in enumerate(self._lines(), 1) if line is None), None)

    def _lines(self) -> Iterator[_Line | None]:
        """Yield the lines, None for a damaged line; a truncated last line is left out."""
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
        """End the last line, or remove it if it is truncated."""
        content = self._content()
        last = content.rpartition(b"\n")[2]
        if _parsed(last) is not None:
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))
        self._is_whole = True


def _parsed(line: bytes) -> _Line | None:
    try:
        return _Line.model_validate_json(line)
    except ValidationError:
        return None
