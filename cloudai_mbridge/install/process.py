"""Run git, pip and enroot: no shell, no terminal to ask on, nothing left running, their last words in one line."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.models.credentials import is_secret

_ERROR_LINE = re.compile(r"\b(?:fatal|\w*error)\b\s*[:\]]", re.IGNORECASE)
_USERINFO = re.compile(r"://[^/@\s]+@")
_SHOWN_LINES = 3
_SHORTEST_SECRET = 4


def run_tool(*argv: str | Path, env: Mapping[str, str], missing: str, cwd: Path | None = None) -> str:
    """Run a command to its end and return its output.

    Args:
        env: its whole environment.
        missing: what to do where the command is not installed.

    Raises:
        ToolFailure: it is not installed, or failed: with its own words.
    """
    words = [str(word) for word in argv]
    code, out, err = _communicate(words, env, missing, cwd)
    if code != 0:
        name = Path(words[0]).name
        said = last_words(f"{out}\n{err}", env) or "and said nothing"
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise ToolFailure(f"{name} {how}: {said}")
    return out


def _communicate(words: Sequence[str], env: Mapping[str, str], missing: str, cwd: Path | None) -> tuple[int, str, str]:
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
            start_new_session=True,  # no terminal to ask for a password on, and a group of its own to end
        )
    except OSError as error:
        raise ToolFailure(f"{words[0]} cannot be started here ({error.strerror}); {missing}") from None
    with process:
        try:
            out, err = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def last_words(text: str, env: Mapping[str, str]) -> str:
    """Return the last lines that tell of an error, else the last line, in one line and without credentials."""
    lines = [clean for line in text.splitlines() if (clean := _printable(line))]
    telling = [line for line in lines if _ERROR_LINE.search(line)] or lines[-1:]
    words = "; ".join(dict.fromkeys(telling[-_SHOWN_LINES:]))
    for name, value in env.items():
        if is_secret(name) and len(value) >= _SHORTEST_SECRET:
            words = words.replace(value, "***")
    return _USERINFO.sub("://***@", words)


def _printable(line: str) -> str:
    without_colours = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line)
    return "".join(c for c in without_colours if c.isprintable()).strip()
