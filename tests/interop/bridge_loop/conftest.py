"""Megatron-Bridge's own loop beside ours, on a CPU: `make interop` runs this with Python 3.12.

Needed are Megatron-Bridge 0.6 and what it imports; without them everything here is skipped. What the other tests of
`make interop` need is not.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkServer
from tests.interop.conftest import Skipped
from tests.training.conftest import Finished

NEEDED = ("transformers", "hydra", "omegaconf", "datasets", "peft", "accelerate", "einops", "torch")
RELEASE = "0.6."


def why_skipped() -> str | None:
    """Say what is missing; None where nothing is."""
    try:
        found = version("megatron-bridge")
    except PackageNotFoundError:
        return f"megatron-bridge {RELEASE}x is not installed"
    if not found.startswith(RELEASE):
        return f"megatron-bridge {found} is installed, and {RELEASE}x needed"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class SkippedHere(Skipped):
    """A module that is not imported."""

    def collect(self) -> list[pytest.Item]:
        raise pytest.skip.Exception(f"beside the real loop: {why_skipped()}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    made = SkippedHere if why_skipped() else pytest.Module
    return made.from_parent(parent, path=module_path)


_OURS, _THEIRS = ForkServer("ranks"), ForkServer("bridge")
_THEIR_PROGRAM = Path(__file__).with_name("train_upstream.py")


@dataclass
class Beside:
    """One case for both loops, in one directory: the sections that Megatron-Bridge is given, and the YAML it writes."""

    directory: Path
    case: Mapping[str, Any]
    ranks: int = 1
    logs: list[Path] = field(default_factory=list)

    def theirs(self, **checkpoint: Any) -> dict[str, Any]:
        """Train with Megatron-Bridge, which writes `theirs.yaml`; return the notes of its callbacks."""
        files = {"yaml": str(self.directory / "theirs.yaml"), "notes": str(self.directory / "notes.json")}
        (self.directory / "case.json").write_text(json.dumps({**self.case, **files, "checkpoint": checkpoint}))
        self._run(_THEIRS, [str(_THEIR_PROGRAM), "case.json"])
        notes: dict[str, Any] = json.loads((self.directory / "notes.json").read_text())
        return notes

    def ours(self, file: str, *overrides: str) -> list[dict[str, Any]]:
        """Train with our loop from a file; return its step records."""
        return self._run(_OURS, ["-m", "cloudai_mbridge.training", "--config", file, *overrides]).records

    def _run(self, server: ForkServer, program: list[str]) -> Finished:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = server.run(program, self.directory, env, processes=self.ranks, timeout=300)
        assert done is not None
        self.logs.append(self.directory / f"{len(self.logs) + 1}.log")
        self.logs[-1].write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return Finished(done.returncode, done.stdout, done.stderr)
