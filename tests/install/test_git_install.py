"""Clones: real git, local repositories."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.installables import MARKER, RepoInstall
from tests.golden import Sentence

pytestmark = pytest.mark.process

Repo = Any  # of conftest.py


def git(directory: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


def stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_branch_tag_and_any_hash_are_checked_out(repo: Repo, tmp_path: Path) -> None:
    first, second, third = repo.commits
    cases = (("main", third), ("v1", first), (third, third), (second, second), (second[:10], second))
    for commit, expected in cases:
        path, installer = tmp_path / "clones" / commit, RepoInstall(repo.url, commit)
        installer.install(path)
        assert git(path, "rev-parse", "HEAD") == expected
        assert git(path, "status", "--porcelain") == ""
        assert json.loads((path / MARKER).read_text())["resolved"] == expected
        assert installer.is_installed(path)
    assert sorted(path.name for path in (tmp_path / "clones").iterdir()) == sorted(commit for commit, _ in cases)


def test_second_install_does_nothing(repo: Repo, tmp_path: Path) -> None:
    """Nor is the marker written through a link of the repository."""
    path, installer, victim = tmp_path / "clone", RepoInstall(repo.url, "main"), tmp_path / "victim"
    victim.write_text("mine")
    (repo.directory / MARKER).symlink_to(victim)
    repo.commit("with a link")
    installer.install(path)
    assert victim.read_text() == "mine"
    assert installer.is_installed(path)
    before = [stamp(file) for file in (path, path / "file.txt", path / MARKER)]
    repo.commit("four")
    installer.install(path)
    assert [stamp(file) for file in (path, path / "file.txt", path / MARKER)] == before


def test_submodules_come_when_asked_for(make_repo: Callable[[str], Repo], tmp_path: Path) -> None:
    outer, inner = make_repo("Outer"), make_repo("Inner")
    git(outer.directory, "submodule", "--quiet", "add", inner.url, "3rdparty/inner")
    outer.commit("with a submodule")
    inner.commit("later")
    path = tmp_path / "clone"
    without, with_them = (RepoInstall(outer.url, "main", wanted) for wanted in (False, True))
    without.install(path)
    assert not (path / "3rdparty/inner/file.txt").exists()
    assert not with_them.is_installed(path)
    with_them.install(path)
    assert (path / "3rdparty/inner/file.txt").read_text() == "three"
    assert without.is_installed(path)
    assert with_them.is_installed(path)


@pytest.mark.parametrize(
    ("url", "commit", "words"),
    [
        (None, "no-such-branch", "couldn't find remote ref no-such-branch"),
        (None, "0" * 40, f"it lacks commit {'0' * 40}"),
        (None, "0123abc", "it lacks commit 0123abc"),
        ("file:///none/at/all", "main", "does not appear to be a git repository|No such file"),
    ],
)
def test_failure_has_gits_words_and_leaves_nothing(
    repo: Repo, tmp_path: Path, url: str | None, commit: str, words: str
) -> None:
    place = tmp_path / "place"
    with pytest.raises(ToolFailure, match=words) as caught:
        RepoInstall(url or repo.url, commit).install(place / "clone")
    assert "\n" not in str(caught.value)
    assert list(place.iterdir()) == []


def test_nasty_directory_names_are_data(make_repo: Callable[[str], Repo], tmp_path: Path) -> None:
    nasty = make_repo("a;touch${IFS}pwned;$(touch${IFS}pwned)`x`'&%0a.git")
    branch = "b;$(touch-pwned)`x`'&"
    git(nasty.directory, "branch", branch)
    path = tmp_path / "clone"
    RepoInstall(nasty.url.replace("%", "%25"), branch).install(path)
    assert git(path, "rev-parse", "HEAD") == nasty.commits[2]
    assert not list(tmp_path.rglob("pwned"))


def test_callers_repository_is_left_alone(
    repo: Repo, make_repo: Callable[[str], Repo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = make_repo("mine")
    monkeypatch.setenv("GIT_DIR", str(mine.directory / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(mine.directory / ".git" / "index"))
    RepoInstall(repo.url, "v1").install(tmp_path / "clone")
    for name in ("GIT_DIR", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name)
    assert git(mine.directory, "remote") == ""
    assert git(mine.directory, "rev-parse", "HEAD") == mine.commits[2]


def test_missing_git_is_said(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ToolFailure) as caught:
        RepoInstall(repo.url, "main").install(tmp_path / "clone")
    sentence(caught)


def test_other_repository_at_the_place_is_kept(
    make_repo: Callable[[str], Repo], tmp_path: Path, sentence: Sentence
) -> None:
    one, other = make_repo("one"), make_repo("other")
    path = tmp_path / "clone"
    RepoInstall(one.url, "v1").install(path)
    with pytest.raises(ToolFailure) as caught:
        RepoInstall(other.url, "v1").install(path)
    sentence(caught)
    assert not RepoInstall(other.url, "v1").uninstall(path)
    assert RepoInstall(one.url, "v1").uninstall(path)
    assert not path.exists()
