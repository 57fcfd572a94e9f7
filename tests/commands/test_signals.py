"""Ctrl-C where no job is watched: it ends the command with 130 and a word, never with a traceback."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import pipeline
from tests.cases import every
from tests.commands.conftest import Run, a_run, finish, name_of
from tests.golden import Sentence

pytestmark = pytest.mark.process
_AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["mbridge", "list", "agents"]
from cloudai_mbridge.__main__ import run
run()
"""
_AT_THE_END = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["mbridge", *{argv!r}]
from cloudai_mbridge.__main__ import run
run()
"""


def run_python(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@every("name", ["cloudai_mbridge.cli", "click", "pydantic", "cloudai_mbridge.commands.plan.list_known"])
def test_while_modules_are_imported(name: str) -> None:
    assert run_python(_AT_IMPORT.format(name=name)) == (130, "", "interrupted\n")


@every(("argv", "code"), [(["list", "agents"], 0), (["list", "nothing"], 2), ([], 2)])
def test_at_the_very_end_the_code_stays(argv: list[str], code: int) -> None:
    done = run_python(_AT_THE_END.format(argv=argv))
    assert done[0] == code, done
    assert "Traceback" not in done[2]


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@every(
    ("function", "words"),
    [
        ("execute", "error: interrupted by SIGINT; nothing was submitted; continue with: mbridge resume {root}"),
        ("report", "error: interrupted by SIGINT; write the report with: mbridge generate-report --result-dir {root}"),
    ],
)
def test_before_and_after_the_jobs(
    mbridge_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, words: str
) -> None:
    run = finish(a_run(tmp_path / "results", name_of(1)))
    monkeypatch.setattr(pipeline, "preflight", lambda prepared: None)
    monkeypatch.setattr(pipeline, function, interrupted)
    code, _, err = mbridge_here("resume", run.root)
    assert (code, err.splitlines()[-1]) == (130, words.format(root=run.root))


def test_an_interrupted_report_does_not_hide_the_first_error(
    mbridge_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise pipeline.BadInput("the journal is gone; may still run: 7")

    run = finish(a_run(tmp_path / "results", name_of(1)))
    monkeypatch.setattr(pipeline, "preflight", lambda prepared: None)
    monkeypatch.setattr(pipeline, "execute", fail)
    monkeypatch.setattr(pipeline, "report", interrupted)
    code, _, err = mbridge_here("resume", run.root)
    assert code == 2
    sentence(err)
