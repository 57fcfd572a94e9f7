"""Commands of the kit: exit codes, output, and their end at the deadline."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cloudai_mbridge.gpu_check.kit import KILL_WAIT_S, TERM_WAIT_S, Kit, PartFailed, end
from tests.golden import Sentence


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_an_exit_code_that_is_not_expected_fails_with_the_end_of_the_output(kit: Kit, sentence: Sentence) -> None:
    with pytest.raises(PartFailed) as caught:
        kit.run(python("import sys; print('out of memory', file=sys.stderr); sys.exit(3)"), log="x")
    sentence(caught)
    assert kit.run(python("import sys; sys.exit(3)"), log="y", codes=(0, 3)) == 3


_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
with open("started.new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("started.new", "started")
child.wait()
"""


def test_a_command_is_ended_at_the_deadline_with_what_it_started(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sentence: Sentence
) -> None:
    """The deadline comes as soon as the command has started another."""
    monkeypatch.chdir(tmp_path)
    started = tmp_path / "started"

    def wait(self: "subprocess.Popen[bytes]", timeout: float) -> int:
        monkeypatch.undo()
        while not started.exists():
            assert self.poll() is None, kit.tail("x")
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(PartFailed) as late:
        kit.run(python(_PARENT), log="x")
    sentence(late)
    assert late.value.is_late
    parent, child = map(int, started.read_text().split())
    assert not psutil.pid_exists(parent)
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)  # it was killed: the process that adopts it may take a moment to notice


def test_nothing_starts_after_the_deadline(kit: Kit, sentence: Sentence) -> None:
    kit.deadline = 0.0
    with pytest.raises(PartFailed) as late:
        kit.run(python("open('started', 'w')"), log="x")
    sentence(late)
    assert late.value.is_late
    assert not list(kit.work.iterdir())


def test_a_process_that_cannot_be_killed_is_left(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a wedged driver holds."""
    waits = []

    def wait(self: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        waits.append(timeout)
        assert timeout is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired(self.args, timeout)

    with (
        subprocess.Popen(python("input()"), stdin=subprocess.PIPE, start_new_session=True) as process,
        monkeypatch.context() as patch,
    ):
        patch.setattr(subprocess.Popen, "wait", wait)
        end(process)
    assert waits == [TERM_WAIT_S, KILL_WAIT_S]


def test_a_worker_that_prints_nothing_fails(kit: Kit, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr(Kit, "run", lambda self, argv, *, log, env: (self.work / f"{log}.stdout").write_text(""))
    with pytest.raises(PartFailed, match="machine:") as caught:
        kit.worker("machine", log="x")
    sentence(caught)


def test_variables_reach_the_command(kit: Kit) -> None:
    kit.run(python("import os; print(os.environ['A'])"), log="x", env={"A": "it's $(id)"})
    assert (kit.work / "x.stdout").read_text() == "it's $(id)\n"
