"""The release of Megatron-Bridge that a test pins.

The pinned commit is a tag (`v0.3.0`), a release branch (`r0.3.0`), or the commit of a release. For any other commit the
version is read from `package_info.py` of an installed clone, and the presets are unknown.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

_PACKAGE_INFO = Path("src/megatron/bridge/package_info.py")


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as 0.3.0, to compare."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Release:
    """A release, and how it was found.

    version: such as 0.3.0.
    source: in a few words, for reports.
    clone: the installed repository, if it is there.
    is_known: the commit is that of a release; else `version` is from the package_info.py of a clone.
    """

    version: str
    source: str
    clone: Path | None = None
    is_known: bool = True

    @property
    def key(self) -> tuple[int, ...]:
        """The version's numbers, to compare."""
        return version_key(self.version)

    @property
    def core(self) -> str | None:
        """Its release of Megatron-Core, such as 0.18; the minor version's for an unknown patch."""
        minor = ".".join(self.version.split(".")[:2])
        alike = [known for known in known_releases() if known["version"].startswith(f"{minor}.")]
        exact = [known for known in alike if known["version"] == self.version]
        found = (exact or alike or [{"core": ""}])[-1]["core"]
        return ".".join(found.split(".")[:2]) or None


def find_release(commit: str, clone: Path | None = None) -> Release | None:
    """Return the release of a pinned commit, or None if unknown.

    clone: path of the repository's clone at that commit, if installed.
    """
    released = _tagged(commit) or _patch_of_branch(commit)
    installed = _version_of(clone) if clone is not None else None
    if clone is not None and installed:
        return Release(_tagged(commit) or installed, f"the installed {clone.name}", clone, released is not None)
    if released is None:
        return None
    return Release(released, f"{'commit' if _tagged(commit) else 'branch'} {commit}")


def _patch_of_branch(commit: str) -> str | None:
    """Return the newest release of a release branch such as r0.3.0."""
    branch = re.fullmatch(r"r(\d+\.\d+)(\.\d+)?", commit)
    versions = [str(known["version"]) for known in known_releases()]
    return next((one for one in reversed(versions) if branch and one.startswith(f"{branch[1]}.")), None)


def _tagged(commit: str) -> str | None:
    """Return the release tagged at a commit; its package_info.py may differ: v0.6.0 has 0.6.1."""
    for known in known_releases():
        if commit.removeprefix("v") == known["version"] or (len(commit) >= 7 and known["commit"].startswith(commit)):
            return str(known["version"])
    return None


@cache
def known_releases() -> tuple[dict[str, Any], ...]:
    """Return the releases that the shipped data describe, oldest first."""
    text = (files("cloudai_mbridge.megatron_bridge") / "data" / "releases.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["release"])


def _version_of(clone: Path) -> str | None:
    """Read MAJOR, MINOR and PATCH of a clone's package_info.py, without running it."""
    try:
        text = (clone / _PACKAGE_INFO).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)\s*$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None
