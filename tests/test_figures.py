"""Figures that tests note, in sessions with workers of either kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.process

CONFTEST = """
from tests import figures, workers
from tests.figures import figure

pytest_addoption = workers.pytest_addoption

def pytest_configure(config):
    figures.pytest_configure(config)
    workers.pytest_configure(config)
"""
TEST = """
import pytest

@pytest.mark.parametrize("name", ["x", "y/z"])
def test_some(figure, name):
    figure(f"\\n306 of 379 {name}")
    figure("two lines")
"""
SHOWN = """\
test_a-test_some-x: 306 of 379 x
two lines
test_a-test_some-y-z: 306 of 379 y/z
two lines
test_b-test_some-x: 306 of 379 x
"""


def session(directory: Path, *arguments: str, **env: str) -> str:
    for name, text in {
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\n",
        "test_a.py": TEST,
        "test_b.py": TEST,
    }.items():
        (directory / name).write_text(text)
    inherited = {name: value for name, value in os.environ.items() if name != "TEST_FIGURES"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env={**inherited, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [(), ("--fork", "2"), ("-n", "2")], ids=["alone", "fork", "xdist"])
def test_a_session_shows_them_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    shown = session(tmp_path, *arguments)
    assert SHOWN in shown
    assert shown.count("306 of 379 x") == 2


def test_who_names_a_directory_shows_them(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    assert "306 of 379" not in session(tmp_path, "--fork", "2", TEST_FIGURES=str(kept))
    assert {path.name for path in kept.iterdir()} == {
        f"test_{file}-test_some-{name}.txt" for file in "ab" for name in ("x", "y-z")
    }
