"""A tool ends with the process that started it, also if that is told to end while the tool starts."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install import process
from cloudai_mbridge.install.process import run_tool

pytestmark = pytest.mark.process


class Ended(Exception):
    """What a handler raises."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_tool_starts(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def end(*_: Any) -> None:
        raise Ended

    started: list[subprocess.Popen[str]] = []

    class Slow(subprocess.Popen[str]):
        """The signal comes when the child is there, and before anybody has its process id."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(process.subprocess, "Popen", Slow)
    before = signal.signal(number, end)
    try:
        with pytest.raises(Ended):
            run_tool("sleep", "600", env={"PATH": "/usr/bin:/bin"}, missing="")
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(("name", "said"), [("no", "cannot be started here"), ("a\0b", "null byte")])
def test_a_tool_that_cannot_start_leaves_the_handlers(tmp_path: Path, name: str, said: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((ToolFailure, ValueError), match=said):
        run_tool(tmp_path / name, env={}, missing="")
    assert signal.getsignal(signal.SIGTERM) is before
