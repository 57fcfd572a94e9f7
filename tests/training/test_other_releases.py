"""Losses and checkpoints of other releases of Megatron-Core: each release goes on where another one stopped.

tests/data/releases holds, written with 0.16.1 and 0.19.2, the losses of one process and a checkpoint of its third step.
This writes them anew with the installed release:

    python -m tests.training.test_other_releases FILE.tar.gz
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data
from tests.training.conftest import run_ranks

pytestmark = pytest.mark.process

pytest.importorskip("torch")

DATA = Path(__file__).parents[1] / "data" / "releases"
RELEASES = ("0.16.1", "0.19.2")
STEPS, SAVED = 6, 3
TOLERANCE = 1e-4
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 8},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "as saved": (1, {}),
    "tensor parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline parallel": (2, {"pipeline_model_parallel_size": 2}),
}


def container(model: str, layout: dict[str, Any], **checkpoint: Any) -> dict[str, Any]:
    fields = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2}
    shape = {"num_query_groups": 2, "vocab_size": 64, "seq_length": 32, "dtype": "fp32"}
    shape["make_vocab_size_divisible_by"] = 32  # 64 whether or not it is split: padding counts in the loss
    stop = {"exit_interval": SAVED} if "save" in checkpoint else {}
    return container_data(
        {
            "model": {**fields, **shape, **MODELS[model], **layout},
            "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 8, **stop},
            "optimizer": {"lr": 5e-3, "min_lr": 5e-4, "use_distributed_optimizer": True},
            "scheduler": {"lr_warmup_iters": 1, "lr_decay_iters": STEPS},
            "checkpoint": {"dist_ckpt_optim_fully_reshardable": True, **checkpoint},
        }
    )


def losses(directory: Path, config: dict[str, Any], processes: int = 1) -> dict[int, float]:
    """Train; return the loss of every step."""
    (directory / "config.json").write_text(json.dumps(config))
    return run_ranks(processes, ["-m", "cloudai_mbridge.training", "--config", "config.json"], directory).losses


@pytest.fixture
def written(tmp_path: Path, release: str) -> Path:
    """Unpack what a release wrote."""
    with tarfile.open(DATA / f"{release}.tar.gz") as archive:
        archive.extractall(tmp_path / "written", filter="data")
    return tmp_path / "written"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", RELEASES)
def test_one_process_learns_the_same(written: Path, model: str, tmp_path: Path) -> None:
    recorded = json.loads((written / f"{model}.json").read_text())
    found = losses(tmp_path, container(model, {}))
    assert list(found.values()) == pytest.approx(recorded, abs=TOLERANCE)
    assert recorded[-1] < recorded[0] - 0.05, "it did not learn"


@pytest.mark.parametrize(
    "layout", ["as saved", *(pytest.param(name, marks=pytest.mark.long) for name in [*LAYOUTS][1:])]
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_checkpoint_is_trained_on(written: Path, model: str, layout: str, tmp_path: Path) -> None:
    recorded = json.loads((written / f"{model}.json").read_text())
    processes, fields = LAYOUTS[layout]
    config = container(model, fields, load=str(written / model))
    found = losses(tmp_path, config, processes)
    assert list(found) == list(range(SAVED + 1, STEPS + 1))
    assert list(found.values()) == pytest.approx(recorded[SAVED:], abs=TOLERANCE)


def main(archive: Path) -> None:
    """Write the losses and the checkpoints of the installed release."""
    with tarfile.open(archive, "w:gz") as file:
        for model in MODELS:
            with tempfile.TemporaryDirectory() as work:
                found = losses(Path(work), container(model, {}))
                losses(Path(work), container(model, {}, save=model, save_interval=SAVED))
                Path(work, f"{model}.json").write_text(json.dumps(list(found.values())) + "\n")
                for name in (model, f"{model}.json"):
                    file.add(Path(work, name), name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
