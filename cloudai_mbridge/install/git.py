"""Clone a repository at a commit, branch or tag."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.place import MARKER, Facts, Installable
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.megatron_bridge.pins import repo_path

_HASH = re.compile(r"[0-9a-fA-F]{4,64}")
# Set if mbridge is started from a git hook or alias; they would redirect git to that repository
_CALLERS_REPOSITORY = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
}


@dataclass(frozen=True)
class RepoInstall(Installable):
    """A clone of a repository at a commit, branch or tag.

    It has no history where the server allows that; credentials come from git's own helpers.
    """

    url: str
    commit: str
    init_submodules: bool = False

    def __str__(self) -> str:
        return f"repository {self.url} at {self.commit}"

    def place(self, install_path: Path) -> Path:
        return repo_path(install_path, self.url, self.commit)

    @property
    def identity(self) -> Facts:
        return {"kind": "repository", "url": self.url, "commit": self.commit}

    def accepts(self, marker: Facts, path: Path) -> bool:
        has_submodules = bool(marker.get("submodules")) or not self.init_submodules
        return super().accepts(marker, path) and has_submodules and (path / ".git").exists()

    def build(self, payload: Path, path: Path) -> Facts:
        """Clone; a branch or tag is resolved now and not updated later."""
        payload.mkdir()
        _git(payload, "init", "--quiet")
        _git(payload, "remote", "add", "--", "origin", self.url)
        _git(payload, "checkout", "--quiet", "--detach", self._fetch(payload))
        if self.init_submodules:
            _git(payload, "submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1")
        exclude = payload / ".git" / "info" / "exclude"
        exclude.parent.mkdir(exist_ok=True)
        with exclude.open("a", encoding="utf-8") as file:
            file.write(f"/{MARKER}\n")
        return {"resolved": resolved_commit(payload), "submodules": self.init_submodules}

    def _fetch(self, payload: Path) -> str:
        """Fetch the commit alone, or everything if the server does not serve its hash alone; return its name."""
        commit = self.commit
        try:
            _git(payload, "fetch", "--quiet", "--no-tags", "--depth", "1", "--", "origin", commit)
            return "FETCH_HEAD"
        except ToolFailure:
            if not _HASH.fullmatch(commit):
                raise
        _git(payload, "fetch", "--quiet", "--tags", "--", "origin", "+refs/heads/*:refs/remotes/origin/*")
        try:
            return _git(payload, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
        except ToolFailure as error:
            raise ToolFailure(f"it lacks commit {commit}: {error}") from None


def resolved_commit(clone: Path) -> str:
    """Return the hash of the commit that is checked out."""
    return _git(clone, "rev-parse", "HEAD").strip()


def _git(directory: Path, *args: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in _CALLERS_REPOSITORY}
    env["GIT_TERMINAL_PROMPT"] = "0"
    return run_tool("git", *args, env=env, cwd=directory, missing="install git, or check PATH")
