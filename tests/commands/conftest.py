"""Commands in this process, and directories of runs in every state."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import cli, pipeline
from cloudai_mbridge.runner import Journal
from tests.report.conftest import EMBEDDED, ARun, a_log

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mbridge_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process; return the exit code, and what was printed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*argv: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mbridge", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return run


def name_of(day: int, scenario: str = "gpt_tiny_sweep") -> str:
    return f"{scenario}_2026-11-{day:02}_02-00-00"


def a_run(directory: Path, name: str) -> ARun:
    directory.mkdir(exist_ok=True)
    return ARun(directory / name, EMBEDDED)


def finish(run: ARun, *, good: int = 2, times: tuple[float, ...] = (0.5, 0.25)) -> ARun:
    """End its runs, the first so many well, and report."""
    for number, (key, time) in enumerate(zip(run.keys, times, strict=True)):
        run.ended(key, a_log(6, step_time_s=time) if number < good else "")
    journal = Journal(run.root / "journal.sqlite")
    for number, key in enumerate(run.keys):
        journal.decided(key, *(("success", []) if number < good else ("failed", ["why"])))
    journal.close()
    pipeline.report(run.root)
    return run


def dry(run: ARun) -> None:
    change_plan(run, dry_run=True)
    (run.root / "journal.sqlite").unlink()


def change_plan(run: ARun, **values: Any) -> None:
    plan = json.loads((run.root / "plan.json").read_text())
    (run.root / "plan.json").write_text(json.dumps({**plan, **values}))
