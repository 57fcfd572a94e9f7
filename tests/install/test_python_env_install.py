"""Environments: a real venv, a real pip, a package of our own in place of NeMo-Run."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.installables import MARKER, PythonEnvInstall, RepoInstall
from tests.golden import Sentence

pytestmark = pytest.mark.process

Repo = Any  # of conftest.py


def output_of(*argv: Path | str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(repo: Repo, tmp_path: Path) -> Path:
    item = RepoInstall(repo.url, "main")
    path = item.place(tmp_path / "with space")
    item.install(path)
    return path


def test_environment_works_at_its_place_and_is_made_once(
    repo: Repo, clone: Path, tmp_path: Path, make_package: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the caller's modules are not to be taken for installed ones
    (tmp_path / "stand_in-1.0.dist-info").mkdir()
    (tmp_path / "stand_in-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stand_in\nVersion: 1.0\n"
    )
    item = PythonEnvInstall(RepoInstall(repo.url, "main"), (str(make_package("extra")),))
    path, installer = tmp_path / "with space" / "env", item
    installer.install(path)
    monkeypatch.delenv("PYTHONPATH")
    assert output_of(path / "bin" / "stand_in") == "this is stand_in"
    assert output_of(path / "bin" / "extra") == "this is extra"
    assert output_of(path / "bin" / "python", "-c", "import sys; print(sys.prefix)") == str(path)
    assert not [file for file in (path / "bin").iterdir() if b".mbridge-partial-" in file.read_bytes()]
    before = (path.stat().st_ino, path.stat().st_mtime_ns, (path / MARKER).stat().st_mtime_ns)
    installer.install(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns, (path / MARKER).stat().st_mtime_ns) == before
    assert not PythonEnvInstall(item.repo, ("other",)).is_installed(path)
    (path / "bin" / "python").unlink()
    assert not installer.is_installed(path)
    assert installer.uninstall(path)
    assert list(path.parent.iterdir()) == [clone]


def test_failure_has_pips_words_and_leaves_nothing(repo: Repo, clone: Path, tmp_path: Path) -> None:
    item = PythonEnvInstall(RepoInstall(repo.url, "main"), ("no-such-package==1.2.3",))
    with pytest.raises(ToolFailure, match=r"No matching distribution found for no-such-package==1\.2\.3") as caught:
        item.install(clone.parent / "env")
    assert "\n" not in str(caught.value)
    assert list(clone.parent.iterdir()) == [clone]


def test_environment_needs_its_repository(repo: Repo, tmp_path: Path, sentence: Sentence) -> None:
    item = PythonEnvInstall(RepoInstall(repo.url, "main"))
    with pytest.raises(ToolFailure) as caught:
        item.install(tmp_path / "env")
    sentence(caught)
    assert os.listdir(tmp_path) == ["origins"]
