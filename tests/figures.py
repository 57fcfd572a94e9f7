"""Figures that tests find, such as "306 of 379 are taken": each is a file, and the session prints all at its end.

Workers inherit the directory. Where `TEST_FIGURES` names one from outside, who has set it prints the files, as .ci/run
does at the end of several sessions.
"""

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLE = "TEST_FIGURES"
Figure = Callable[[str], None]


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE not in os.environ:
        directory = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="mbridge-figures-")
        config.pluginmanager.register(Shown(Path(directory)))


class Shown:
    """The directory of a session that shows its figures itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if files := sorted(self._directory.iterdir()):
            terminalreporter.section("figures")
            for file in files:
                terminalreporter.write_line(f"{file.stem}: {file.read_text().strip()}")

    def pytest_unconfigure(self) -> None:
        os.environ.pop(VARIABLE, None)
        shutil.rmtree(self._directory, ignore_errors=True)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Note a figure, of one or more lines; one test may note several."""
    return functools.partial(note, request.node)


def note(node: pytest.Item | pytest.Collector, text: str) -> None:
    """Note a figure of a test or of a module."""
    name = re.sub(r"[^\w.=-]+", "-", node.nodeid.removeprefix("tests/").replace(".py", "")).strip("-")[:200]
    with Path(os.environ[VARIABLE], f"{name}.txt").open("a") as file:
        file.write(text.strip("\n") + "\n")
