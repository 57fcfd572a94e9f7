"""Completion command: receives the run's directory as $MBRIDGE_RUN and the JSON on stdin."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cloudai_mbridge.install.process import last_words
from cloudai_mbridge.models.scenario import OnCompletion

RUN_VARIABLE = "MBRIDGE_RUN"
_MOST_READ = 1 << 16
_KILLED_S = 1.0


class Command:
    """A started command, in a process group of its own; or a command that failed to start."""

    def __init__(self, words: list[str], root: Path, body: bytes) -> None:
        self._name, self._output = words[0], tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        with tempfile.TemporaryFile() as stdin:  # a pipe would fill up if the command does not read
            stdin.write(body)
            stdin.seek(0)
            try:
                self._process = subprocess.Popen(
                    words,
                    stdin=stdin,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, RUN_VARIABLE: str(root)},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                self._why = getattr(error, "strerror", None) or type(error).__name__

    @classmethod
    def of(cls, asked: OnCompletion, root: Path, body: bytes) -> Iterator[Self]:
        """Start the configured command, if any."""
        if asked.command:
            yield cls(asked.command, root, body)

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, why: str) -> str:
        """Stop the command if it runs, and return the problem, "" on success. why: the reason to stop it."""
        with self._output:
            return self._problem(why)

    def _problem(self, why: str) -> str:
        if self._process is None:
            return f"{self._name}: cannot be started ({self._why})"
        if self.is_open:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(_KILLED_S)
            return f"{self._name} {why}"
        code = self._process.returncode
        if code == 0:
            return ""
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        return f"{self._name} {how}: {self._said() or 'without output'}"

    def _said(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _MOST_READ))
        return last_words(self._output.read().decode(errors="replace"), os.environ)
