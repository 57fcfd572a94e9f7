"""Run git, pip and enroot: no shell, no terminal prompts, no leftover processes, their error messages in one line."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.training.credentials.find import is_secret
from cloudai_mbridge.training.credentials.scrub import MASK, redacted

_ERROR_LINE = re.compile(r"\b(?:fatal|\w*error)\b\s*[:\]]", re.IGNORECASE)
_SHOWN_LINES = 3
_SHORTEST_SECRET = 4


def run_tool(*argv: str | Path, env: Mapping[str, str], missing: str, cwd: Path | None = None) -> str:
    """Run a command to its end and return its output.

    env: its whole environment. missing: the remedy if the command is not installed.
    ToolFailure: it is not installed, or failed: with its own message.
    """
    code, out, err = _communicate([str(word) for word in argv], env, missing, cwd)
    if code != 0:
        said = last_words(f"{out}\n{err}", env) or "without output"
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise ToolFailure(f"{Path(argv[0]).name} {how}: {said}")
    return out


def _communicate(words: Sequence[str], env: Mapping[str, str], missing: str, cwd: Path | None) -> tuple[int, str, str]:
    signals = _Signals()
    try:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # no terminal for a password prompt, and a group of its own to end
        )
    except BaseException as error:
        signals.act()
        if not isinstance(error, OSError):
            raise
        raise ToolFailure(f"{words[0]} cannot be started here ({error.strerror}); {missing}") from None
    with process:
        try:
            signals.act()
            out, err = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


class _Signals:
    """Defer the signals that end this process until `act`: a signal while a tool starts would leave it running."""

    def __init__(self) -> None:
        self._came: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        self._before = {number: signal.signal(number, self._keep) for number in numbers}

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def act(self) -> None:
        """Restore the handlers, and raise the deferred signals."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for came in self._came:
            signal.raise_signal(came)


def last_words(text: str, env: Mapping[str, str]) -> str:
    """Return the last lines that report an error, else the last line, in one line and without credentials."""
    plain = (re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line) for line in text.splitlines())  # without colours
    lines = list(filter(None, ("".join(filter(str.isprintable, line)).strip() for line in plain)))
    telling = [line for line in lines if _ERROR_LINE.search(line)] or lines[-1:]
    words = "; ".join(dict.fromkeys(telling[-_SHOWN_LINES:]))
    for name, value in env.items():
        if is_secret(name) and len(value) >= _SHORTEST_SECRET:
            words = words.replace(value, MASK)
    return redacted(words)
