"""`import cloudai_mbridge as mb`: its names, and what it does not import."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge import api
from cloudai_mbridge.report.rows import run_columns
from tests.api.conftest import write_sweep
from tests.cases import every

OLD = {
    "JobStatusResult",
    "MegatronBridgeCmdArgs",
    "MegatronBridgeTestDefinition",
    "extract_mbridge_metrics",
    "__version__",
}


def test_the_package_has_the_names_of_its_api() -> None:
    assert set(mb.__all__) == {*api.__all__, *OLD}
    assert set(mb.__all__) <= set(dir(mb))
    assert all(getattr(mb, name) is getattr(api, name) for name in api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = mb.lod


def test_no_name_is_that_of_a_package_which_would_take_its_place() -> None:
    modules = {path.stem for path in Path(api.__file__).parents[1].iterdir()}
    assert not modules & set(mb.__all__)


def test_no_two_classes_have_the_same_name() -> None:
    modules = [path.read_text() for path in Path(mb.__file__).parent.rglob("*.py")]
    names = Counter(name for text in modules for name in re.findall(r"^ *class (\w+)[(:\[]", text, re.MULTILINE))
    assert len(names) > 100
    assert [name for name, number in names.items() if number > 1] == []


@every("name", api.__all__)
def test_every_name_is_documented(name: str, repository: Path) -> None:
    assert f"`{name}" in (repository / "docs" / "scripting.md").read_text()
    assert getattr(api, name).__doc__


def test_every_column_of_a_report_is_documented(repository: Path) -> None:
    page = (repository / "docs" / "scripting.md").read_text()
    assert [name for name in run_columns([]) if f"`{name}`" not in page] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("dir(mb); mb.__version__", "torch numpy pydantic click rich pandas pyarrow cloudai_mbridge.api"),
        ("mb.load('scenario.toml', system='system.toml').plan()", "torch numpy scipy pandas pyarrow"),
    ],
    ids=["the package", "a plan"],
)
def test_imports_are_cheap(code: str, absent: str, tmp_path: Path) -> None:
    write_sweep(tmp_path)
    names = f"import sys, cloudai_mbridge as mb; {code}; print(*set({absent!r}.split()) & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", names], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done
