"""Upstream's sources are found or missed loudly, and what is not installed has metadata."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
TREES = ("cloudai", "megatron-bridge-0.6")

pytestmark = pytest.mark.process


def _find(directory: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    others = {name: value for name, value in os.environ.items() if name != "MBRIDGE_REQUIRE_UPSTREAM"}
    command = [CI / "find-upstream", directory, *TREES]
    return subprocess.run(command, env={**others, **env}, capture_output=True, text=True, check=False)


def test_absent_sources_are_named_and_an_error_only_where_they_are_required(tmp_path: Path) -> None:
    for present in ((), TREES[:1], TREES):
        for name in present:
            (tmp_path / name).mkdir(exist_ok=True)
        found, required = _find(tmp_path), _find(tmp_path, MBRIDGE_REQUIRE_UPSTREAM="1")
        assert found.stdout.split() == list(present)
        assert found.returncode == 0
        absent = [name for name in TREES if name not in present]
        assert required.returncode == (1 if absent else 0)
        assert all(name in found.stderr for name in absent)
        assert ("WAS NOT RUN" in found.stderr, "WERE NOT RUN" in found.stderr) == (not present, len(present) == 1)
        assert absent or not found.stderr


def test_metadata_are_those_of_the_tree_that_was_given_last(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    for project, version in (
        ('dynamic = ["version"]\n[tool.pdm.version]\nfallback_version = "1.6.0+unknown"', "1.6.0+unknown"),
        ('version = "1.7"', "1.7"),
    ):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "cloudai"\n{project}\n')
        subprocess.run([python, CI / "stub-metadata", tmp_path], check=True)
        asked = [python, "-I", "-c", "import importlib.metadata as m; print(*(d.version for d in m.distributions()))"]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split() == [version]
