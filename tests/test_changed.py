"""Which tests a change touches: tests/changed.py."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import changed
from tests.changed import ROOT, Graph, Selection, changed_files

PRODUCT = "cloudai_mbridge"
# Changed file -> tests that it touches, and some that it does not; one that starts processes ends in "!"
TOUCHED = {
    "cloudai_mbridge/report/junit.py": (
        "tests/report/test_junit.py tests/e2e/test_gate.py! tests/slurm/test_commands.py!",
        "tests/sweep/test_grid.py tests/estimate/test_hardware.py tests/training/test_groups.py!",
    ),
    "cloudai_mbridge/report/html/assets/css/theme.css": (
        "tests/report/html/test_html_page.py! tests/report/html/test_html_page.py",
        "tests/slurm/test_parsing.py tests/training/test_groups.py!",
    ),
    "cloudai_mbridge/verdict/failures.toml": ("tests/verdict/test_triage.py", "tests/models/test_hostlist.py"),
    # by names in a table
    "cloudai_mbridge/commands/gate/confirm.py": ("tests/commands/test_command_table.py", "tests/gate/test_trend.py"),
    "cloudai_mbridge/training/train.py": (
        "tests/training/test_groups.py! tests/e2e/test_local_run.py! tests/training/test_exits.py!",
        "tests/gate/test_trend.py tests/report/test_junit.py",
    ),
    "tests/gate/test_trend.py": ("tests/gate/test_trend.py", "tests/gate/test_judge.py tests/e2e/test_gate.py!"),
    "tests/gate/some_runs.py": ("tests/gate/test_judge.py", "tests/gate/test_trend.py"),
    "tests/report/conftest.py": (
        "tests/report/test_junit.py tests/report/html/test_html_page.py!",
        "tests/sweep/test_grid.py",
    ),
    "tests/stand_in/training.py": ("tests/e2e/test_gate.py!", "tests/sweep/test_grid.py"),
    "tests/training/data/reading.py": ("tests/training/data/test_iterators.py", "tests/sweep/test_grid.py"),
    "tests/sentences.txt": ("tests/test_golden.py", "tests/sweep/test_grid.py tests/e2e/test_gate.py!"),
    "tests/data/failed_jobs.txt": ("tests/verdict/test_triage.py tests/sweep/test_grid.py", ""),
    "docs/gate.md": ("tests/docs/test_pages.py!", "tests/sweep/test_grid.py tests/e2e/test_gate.py!"),
    "conf/gates/default.toml": ("tests/e2e/test_gate.py!", "tests/sweep/test_grid.py tests/training/test_groups.py!"),
    "README.md": ("tests/docs/test_pages.py!", "tests/gate/test_trend.py"),
}
OF_ALL = [
    *("tests/conftest.py", "tests/forked.py", "pyproject.toml", "constraints.txt", "of_a_new_kind.toml"),
    *("cloudai_mbridge/deleted.py", "cloudai_mbridge/report/deleted.css", "tests/gate/deleted.py"),
]


@pytest.fixture(scope="module", autouse=True)
def graph() -> Graph:
    """Read the imports once."""
    graph = Graph()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed, "Graph", lambda: graph)
        yield graph


@pytest.mark.parametrize("file", TOUCHED)
def test_what_a_change_touches(file: str) -> None:
    assert (ROOT / file).exists()
    selection = Selection([file])
    assert selection.why_all == ""
    for tests, runs in zip(TOUCHED[file], (True, False), strict=True):
        for test in tests.split():
            assert (ROOT / test.removesuffix("!")).exists(), test
            assert selection.has(test.removesuffix("!"), test.endswith("!")) is runs, test


@pytest.mark.parametrize("file", OF_ALL)
def test_what_touches_all(file: str) -> None:
    selection = Selection(["docs/gate.md", file])
    assert selection.why_all == file
    assert selection.has("tests/sweep/test_grid.py", False)


def test_a_changed_sentence_touches_the_tests_that_check_some() -> None:
    assert Selection(["tests/sentences.txt"]).has("tests/sweep/test_grid.py", False, {"sentence"})


def test_nothing_changed() -> None:
    assert not Selection([]).has("tests/e2e/test_gate.py", True)


def test_imports_on_demand_are_known() -> None:
    """A module that imports by a name that it puts together stands in a table, or imports other packages so."""
    others = {
        "compat.models",
        "config.profiling",
        "models.hooks",
        "models.provider",
        "resilience.packages",
        "warm_start",
    }
    known = {*changed.ON_DEMAND, *changed.SERVED, *(f"training.{name}" for name in others)}
    known |= {"gpu_check.machine", "megatron_bridge.start_launcher", "report.rows"}
    found = {
        ".".join(path.relative_to(ROOT / PRODUCT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / PRODUCT).rglob("*.py")
        if re.search(r"(import_module|iter_modules|walk_packages)\(", path.read_text())
    }
    assert found == known


@pytest.mark.process
def test_changed_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"of {name}, {sorted(path.name for path in tmp_path.iterdir())}")

    git("init", "-b", "main")
    write("kept", "edited", "moved", "deleted", ".gitignore")
    (tmp_path / ".gitignore").write_text("ignored")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "mine")
    write("committed")
    git("mv", "moved", "new name")
    git("add", ".")
    git("commit", "-m", "second")
    git("checkout", "main")
    write("of main")
    git("add", ".")
    git("commit", "-m", "third")
    git("checkout", "mine")
    write("edited", "untracked", "ignored")
    (tmp_path / "deleted").unlink()
    since_head = {"edited", "untracked", "deleted"}
    assert changed_files(tmp_path, "") == {*since_head, "committed", "moved", "new name"}
    assert changed_files(tmp_path, "HEAD") == since_head
    with pytest.raises(pytest.UsageError, match="--changed: git merge-base nowhere HEAD: "):
        changed_files(tmp_path, "nowhere")
