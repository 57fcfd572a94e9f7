"""Shared by the tests of the training program: run it, or a script, on several ranks with gloo."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data
from tests.forked import ForkServer, Process
from tests.kept_ranks import KeptRanks

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
_READ_LATER = re.compile("WANDB_|COMET_|MLFLOW_")  # by packages that ranks import themselves


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
    return tiny_container


def tiny_container(sections: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    sections = sections or {}
    names = [*TINY, *(name for name in sections if name not in TINY)]
    return container_data({name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names})


@pytest.fixture(scope="module")
def _ranks_of_the_module() -> Iterator[KeptRanks]:
    kept = KeptRanks(_SERVER)
    try:
        yield kept
    finally:
        kept.end()


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> KeptRanks | None:
    """Return what keeps ranks from run to run; None for a test without the marker `kept_ranks`."""
    if request.node.get_closest_marker("kept_ranks") is None:
        return None
    ranks: KeptRanks = request.getfixturevalue("_ranks_of_the_module")
    return ranks


@pytest.fixture(scope="module")
def train_once(_ranks_of_the_module: KeptRanks, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run the training program as `train` does, on kept ranks, or return what the same run gave before.

    Each run has a directory of its own.
    """

    @cache
    def run(processes: int, container: str, overrides: tuple[str, ...]) -> Finished:
        directory = tmp_path_factory.mktemp("once")
        (directory / "config.json").write_text(container)
        program = ["-m", "cloudai_mbridge.training", "--config", "config.json", *overrides]
        return run_ranks(processes, program, directory, code=None, kept=_ranks_of_the_module)

    def finished(
        processes: int = 1, sections: Mapping[str, Mapping[str, Any]] | None = None, *overrides: str
    ) -> Finished:
        done = run(processes, json.dumps(tiny_container(sections)), overrides)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done

    return finished


@pytest.fixture
def train(tmp_path: Path, tiny: Callable[..., dict[str, Any]], kept: KeptRanks | None) -> Train:
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
        return run_ranks(processes, program, directory, env, code, kept=kept)

    return run


# As `python -m cloudai_mbridge.training` begins
_QUICK_START = "from cloudai_mbridge.training.cpu import import_megatron\n\nimport_megatron()\n"


@pytest.fixture
def ranks(tmp_path: Path, kept: KeptRanks | None) -> Callable[..., Finished]:
    """Run a script on several ranks in `tmp_path`: ranks(2, "import torch ...", "argument"). It has to exit with 0.

    is_quick: Megatron-Core is imported without torch's compiler; else as the script does it.
    """

    def run(
        processes: int, script: str, *args: str, env: Mapping[str, str] | None = None, is_quick: bool = True
    ) -> Finished:
        start = _QUICK_START if is_quick else ""
        (tmp_path / "script.py").write_text(start + textwrap.dedent(script))
        return run_ranks(processes, ["script.py", *args], tmp_path, env, 0, is_quick=is_quick, kept=kept)

    return run


def started(processes: int, program: list[str], directory: Path, output: Path) -> Process:
    """Start `python PROGRAM`, to be killed: a single rank is forked, several are torchrun's."""
    import torch

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes == 1 and not torch.cuda.is_available():
        forked = _SERVER.start(program, directory, env, output, output)
        if forked is not None:
            return forked
    with output.open("a") as out:
        return subprocess.Popen([*launcher(processes), *program], cwd=directory, stdout=out, stderr=out, env=env)


def run_ranks(
    processes: int,
    program: list[str],
    directory: Path,
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
    *,
    is_quick: bool = True,
    kept: KeptRanks | None = None,
) -> Finished:
    """Run `python PROGRAM` on several ranks, kept or forked if nothing that is asked for decides how it imports.

    code: as for `train`.
    """
    import torch

    whole_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = None
    is_quick = is_quick and all(map(_READ_LATER.match, env or ()))
    if kept is not None and is_quick:
        done = kept.run(processes, program, directory, whole_env, timeout=1500)
    elif is_quick and not torch.cuda.is_available():
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
