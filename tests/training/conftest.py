"""Shared by the tests of the training program: run it, or a script, on several ranks with gloo."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data
from tests.forked import ForkServer

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 512,
        "seq_length": 64,
        "dtype": "fp32",
    },
    "train": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
    "scheduler": {"lr_warmup_iters": 2},
}

_SERVER = ForkServer("ranks")


@dataclass(frozen=True)
class Finished:
    """A training program that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The step records, in order."""
        marked = [line.partition(" ")[2] for line in self.stdout.splitlines() if line.startswith("MBRIDGE_STEP ")]
        return [json.loads(text) for text in marked]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of every logged step."""
        return {record["step"]: record["losses"]["lm loss"] for record in self.records}


Train = Callable[..., Finished]


def launcher(processes: int) -> list[str]:
    """Return the command that starts `processes` ranks; one rank runs without torchrun."""
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def processes_in(directory: Path) -> list[int]:
    """Return the processes whose working directory this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == directory:
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


@pytest.fixture
def tiny() -> Callable[..., dict[str, Any]]:
    """Return a small model's container as plain data: tiny({"model": {"num_layers": 2}, "checkpoint": {...}})."""

    def data(sections: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
        sections = sections or {}
        names = [*TINY, *(name for name in sections if name not in TINY)]
        return container_data({name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names})

    return data


@pytest.fixture
def train(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Train:
    """Run the training program in `tmp_path`: train(2, {"checkpoint": {"save": "ckpt"}}, "train.train_iters=5").

    code: the exit code that is expected; None: any.
    """

    def run(
        processes: int = 1,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        code: int | None = 0,
        directory: Path = tmp_path,
    ) -> Finished:
        (directory / "config.json").write_text(json.dumps(tiny(sections)))
        program = ["-m", "cloudai_mbridge.training", "--config", "config.json", *overrides]
        return run_ranks(processes, program, directory, env, code)

    return run


# As `python -m cloudai_mbridge.training` begins
_QUICK_START = "from cloudai_mbridge.training.cpu import import_megatron\n\nimport_megatron()\n"


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., Finished]:
    """Run a script on several ranks in `tmp_path`: ranks(2, "import torch ...", "argument"). It has to exit with 0.

    is_quick: Megatron-Core is imported without torch's compiler; else as the script does it.
    """

    def run(
        processes: int, script: str, *args: str, env: Mapping[str, str] | None = None, is_quick: bool = True
    ) -> Finished:
        start = _QUICK_START if is_quick else ""
        (tmp_path / "script.py").write_text(start + textwrap.dedent(script))
        return run_ranks(processes, ["script.py", *args], tmp_path, env, 0, is_quick=is_quick)

    return run


def run_ranks(
    processes: int,
    program: list[str],
    directory: Path,
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
    *,
    is_quick: bool = True,
) -> Finished:
    """Run `python PROGRAM` on several ranks, forked if nothing that is asked for decides how it imports.

    code: as for `train`.
    """
    import torch

    whole_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = None
    if is_quick and not env and not torch.cuda.is_available():
        done = _SERVER.run(program, directory, whole_env, processes=processes, timeout=1500)
    if done is None:
        done = subprocess.run(
            [*launcher(processes), *program],
            cwd=directory,
            env=whole_env,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
    if code is not None:
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return Finished(done.returncode, done.stdout, done.stderr)
