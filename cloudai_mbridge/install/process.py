"""Run git, pip and enroot: no shell, no terminal prompts, no leftover processes, their error messages in one line."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.start_up import defer_signals
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
    words = [str(word) for word in argv]
    act_on_signals = defer_signals()
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
        act_on_signals()
        if not isinstance(error, OSError):
            raise
        raise ToolFailure(f"{words[0]} cannot be started here ({error.strerror}); {missing}") from None
    with process:
        try:
            act_on_signals()
            out, err = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if (code := process.returncode) != 0:
        said = last_words(f"{out}\n{err}", env) or "without output"
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise ToolFailure(f"{Path(words[0]).name} {how}: {said}")
    return out


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
