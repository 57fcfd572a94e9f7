"""Run the whole loop on Transformer Engine's real layers, by the emulation, and on the layers of a CPU beside it."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

from tests.transformer_engine.engine import MODEL, MODELS, torch

# isort: split
from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain
from tests.transformer_engine.emulation import emulated

HOPPER, BLACKWELL = (9, 0), (10, 0)  # compute capabilities
STEPS = 4
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Sections = Mapping[str, Mapping[str, Any]]

_LOCAL = """
import json, sys
from cloudai_mbridge.training import cpu
cpu.install()
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain
for name, data in json.load(sys.stdin).items():
    print("CASE", name, flush=True)
    pretrain(ConfigContainer.from_dict(data), forward_step)
"""


@dataclass(frozen=True)
class Run:
    """What a run printed of its steps and its evaluations."""

    text: str

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = self.text.splitlines()
        return [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("MBRIDGE_STEP ")]

    @property
    def losses(self) -> list[float]:
        return [record["losses"]["lm loss"] for record in self.records]

    @property
    def norms(self) -> list[float]:
        """Return the norm of the gradients of every step."""
        return [record["grad_norm"] for record in self.records]

    @property
    def validation(self) -> list[float]:
        """Return the losses of the evaluations."""
        lines = [line for line in self.text.splitlines() if line.lstrip().startswith("validation loss at")]
        return [float(line.split("lm loss value:")[1].split()[0]) for line in lines]


def sections(model: str, fields: Mapping[str, Any], others: Sections) -> dict[str, Any]:
    """Return the container of one of MODELS as data, with these fields of the model and these sections on top."""
    made: dict[str, dict[str, Any]] = {
        "model": {**MODEL, **MODELS[model], **fields},
        "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "scheduler": {},
    }
    for name, values in others.items():
        made[name] = {**made.get(name, {}), **values}
    return container_data(made)


def train(
    model: str,
    fields: Mapping[str, Any] | None = None,
    others: Sections | None = None,
    *,
    precision: Any = None,
    capability: tuple[int, int] = HOPPER,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train one of MODELS for STEPS steps, in this process; precision: the configuration's `mixed_precision`."""
    config = ConfigContainer.from_dict(sections(model, fields or {}, others or {}))
    config.dist.distributed_backend = "gloo"  # which is what decides for tensors on a CPU
    if precision is not None:
        config.mixed_precision = precision
    output = io.StringIO()
    torch.set_num_threads(1)  # as quick for such sizes, and much quicker beside others
    with (
        TemporaryDirectory() as directory,
        chdir(directory),
        mock.patch.dict(os.environ, _ONE_THREAD),
        redirect_stdout(output),
        catch_warnings(),
    ):
        simplefilter("ignore")  # Megatron-Core and torch warn of their own calls
        # What is compiled depends on what was imported before, and compiling asks the driver
        with emulated(capability), torch.compiler.set_stance("force_eager"):
            pretrain(config, forward_step, list(callbacks))
    return Run(output.getvalue())


def train_locally(cases: Mapping[str, dict[str, Any]]) -> dict[str, Run]:
    """Train containers on the layers of a CPU, one after the other, in a process without Transformer Engine."""
    path = [part for part in sys.path if part and not (Path(part) / "transformer_engine").is_dir()]
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join([os.getcwd(), *path[:1]])}
    with TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", _LOCAL],
            input=json.dumps(cases),
            env=environment,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    _, *parts = done.stdout.split("CASE ")
    return {part.partition("\n")[0]: Run(part) for part in parts}


def differences(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two rows of numbers."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


__all__ = ["BLACKWELL", "HOPPER", "Run", "differences", "sections", "torch", "train", "train_locally"]
