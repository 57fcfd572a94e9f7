"""docs/scripting.md and its notebook run as they are."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from tests.api.conftest import write_sweep

NOTEBOOK = Path("docs", "notebooks", "first-sweep.ipynb")


@pytest.mark.process
def test_the_example_of_the_page(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mbridge: Any
) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path, iterations=5)
    first = mb.load("scenario.toml", system="system.toml").plan().run()
    baseline = tmp_path / "baseline.toml"
    done = mbridge("baseline", "promote", first.path, "--baseline", baseline, "--reason", "the first", "--yes")
    assert done.returncode == 0, done.stderr
    Path("policy.toml").write_text('name = "p"\nbaseline = "baseline.toml"\n[[metrics]]\nname = "step_time_s"\n')
    names: dict[str, Any] = {}
    page = (repository / "docs" / "scripting.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(example, "scripting.md", "exec"), names)
    assert names["report"].succeeded
    assert names["gate"].exit_code == 0, names["gate"]
    assert "mb2" in capsys.readouterr().out


def test_the_notebook_is_stored_without_outputs_and_paths(repository: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(repository / NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert not re.search(r"/(home|root|tmp|work|Users)/", (repository / NOTEBOOK).read_text())


def test_the_notebooks_links_exist(repository: Path) -> None:
    """The site's own check of links does not read notebooks."""
    links = re.findall(r"\]\((\.\./[^)#]+)(?:#([^)]+))?\)", (repository / NOTEBOOK).read_text())
    assert links
    for page, anchor in links:
        text = (repository / NOTEBOOK.parent / page).read_text()
        anchors = {
            re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.+)$", text, re.M)
        }
        assert not anchor or anchor in anchors, f"{page}#{anchor}"


def test_no_page_installs_from_an_index_that_lacks_the_product(repository: Path) -> None:
    for page in [repository / "README.md", *(repository / "docs").rglob("*.md"), repository / NOTEBOOK]:
        assert not re.search(r"pip install[^\n`]*cloudai-mbridge", page.read_text()), page


@pytest.mark.process
def test_the_notebook_runs(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(shutil.copy(repository / NOTEBOOK, tmp_path), as_version=4)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = "".join(str(output) for cell in code for output in cell.outputs)
    assert "C04 cmd_args.gb" in shown
    assert "2 success, 0 failed" in shown
    assert "[2/2] micro_batch/mb4/0: success" in shown
    assert "<Gate inconclusive: 2 points" in shown
    runs = [mb.open_run(root).report() for root in (tmp_path / "results").iterdir()]
    assert [report.counts["success"] for report in runs] == [2, 2]
