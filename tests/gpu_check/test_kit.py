"""Commands of the kit: exit codes, output, and their end at the deadline."""

import sys

import psutil
import pytest

from cloudai_mbridge.gpu_check.kit import Kit, PartFailed


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_an_exit_code_that_is_not_expected_fails_with_the_end_of_the_output(kit: Kit) -> None:
    with pytest.raises(PartFailed, match="exit code 3: out of memory"):
        kit.run(python("import sys; print('out of memory', file=sys.stderr); sys.exit(3)"), log="x")
    assert kit.run(python("import sys; sys.exit(3)"), log="y", codes=(0, 3)) == 3


def test_a_command_is_ended_at_the_deadline_with_what_it_started(kit: Kit) -> None:
    started = kit.work / "pid"
    text = f"import os, subprocess, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(10**6)"
    kit.deadline = 0.0
    with pytest.raises(PartFailed, match="still running when the part's time was used up"):
        kit.run(python(text), log="x")
    if started.exists() and (pid := started.read_text()):
        assert not psutil.pid_exists(int(pid))


def test_a_worker_that_prints_nothing_fails(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kit, "run", lambda self, argv, *, log, env: (self.work / f"{log}.stdout").write_text(""))
    with pytest.raises(PartFailed, match="probe: printed nothing"):
        kit.worker("probe", log="x")


def test_variables_reach_the_command(kit: Kit) -> None:
    kit.run(python("import os; print(os.environ['A'])"), log="x", env={"A": "it's $(id)"})
    assert (kit.work / "x.stdout").read_text() == "it's $(id)\n"
