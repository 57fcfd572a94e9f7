"""Channels of a notification: a command, and a webhook. Both are started, and then waited for."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.install.process import last_words
from cloudai_mbridge.models.scenario import OnCompletion

RUN_VARIABLE = "MBRIDGE_RUN"
_MOST_READ = 1 << 16
_KILLED_S = 1.0
_LONGEST_URL = 1 << 14


def start_all(asked: OnCompletion, root: Path, body: bytes) -> "list[Command | Webhook]":
    """Start what is configured. body: the notification's JSON."""
    started: list[Command | Webhook] = [Command(asked.command, root, body)] if asked.command else []
    return [*started, Webhook(asked, body)] if asked.webhook_env or asked.webhook_file else started


class Command:
    """A started command, in a process group of its own; or a command that failed to start.

    It receives the run's directory as $MBRIDGE_RUN and the JSON on stdin.
    """

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

    @property
    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, why: str) -> str:
        """Stop the command if it runs, and return the problem, "" on success. why: the reason to stop it."""
        with self._output:
            if self._process is None:
                return f"{self._name}: cannot be started ({self._why})"
            if self.is_open:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait(_KILLED_S)
                return f"{self._name} {why}"
            if (code := self._process.returncode) == 0:
                return ""
            how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _MOST_READ))
            said = last_words(self._output.read().decode(errors="replace"), os.environ)
            return f"{self._name} {how}: {said or 'without output'}"


class Webhook:
    """A started POST of the JSON. Its thread is a daemon, since a server may never answer.

    The URL may hold a credential, so no message shows any of it.
    """

    def __init__(self, asked: OnCompletion, body: bytes) -> None:
        self._asked, self._body, self._why = asked, body, ""
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def end(self, why: str) -> str:
        """Return the problem, "" on success. why: the reason to stop waiting."""
        name = f"${self._asked.webhook_env}" if self._asked.webhook_env else f"of {self._asked.webhook_file}"
        problem = why if self.is_open else self._why
        return f"webhook {name}: {problem}" if problem else ""

    def _send(self) -> None:
        try:
            from cloudai_mbridge.completion.post import post  # imported only if a webhook is configured

            if self._asked.webhook_file:
                url = read_regular(Path(self._asked.webhook_file), _LONGEST_URL).decode().strip()
            else:
                url = os.environ.get(self._asked.webhook_env or "", "").strip()
            self._why = post(url, self._body) if url else "is not set"
        except Exception as error:
            self._why = getattr(error, "strerror", None) or type(error).__name__
