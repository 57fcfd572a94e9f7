"""Training for a number of passes over fine-tuning data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.training.config import MockGPTDatasetConfig, TrainingConfig
from cloudai_mbridge.training.config.rules.scheduler_steps import check_epochs
from cloudai_mbridge.training.data.finetuning import FinetuningDataset
from cloudai_mbridge.training.data.loader import FILLER, shuffled
from cloudai_mbridge.training.data.samples import Sample
from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import Finished, run_ranks

WORDS = [f"{'x' * (3 * i)}{i}" for i in range(10)]


@pytest.mark.process
def test_passes_over_the_data_are_trained_resumed_and_evaluated(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    """10 samples in batches of 4 are 3 iterations an epoch, and two and a half epochs 8 iterations."""
    for name in ("training", "validation", "test"):
        lines = [json.dumps({"input": word, "output": word.upper()}) for word in WORDS]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = tiny({"model": {"num_layers": 1}, "train": {"global_batch_size": 4, "num_epochs": 2.5, "train_iters": None}})
    data["dataset"] = {
        "_target_": "GPTSFTDatasetConfig", "dataset_root": str(tmp_path), "seq_length": 64, "num_workers": 0
    }  # fmt: skip
    data["tokenizer"] = {"metadata_path": {"library": "byte-level"}, "vocab_size": 256}
    data["validation"] = {"eval_iters": 1, "eval_interval": 4}
    data["checkpoint"] = {**data["checkpoint"], "save": "ckpt", "load": "ckpt"}

    def run(processes: int, *overrides: str) -> Finished:
        (tmp_path / "config.json").write_text(json.dumps(data))
        program = ["-m", "cloudai_mbridge.training", "--config", "config.json", *overrides]
        return run_ranks(processes, program, tmp_path)

    whole = run(1, "checkpoint.save=null", "checkpoint.load=null")
    assert sorted(whole.losses) == list(range(1, 9))
    for where in ("8 |", "8 on validation set |", "8 on test set |"):
        assert whole.stdout.count(f"validation loss at iteration {where}") == 1
    first = run(2, "train.exit_interval=4")
    rest = run(2)
    assert {**first.losses, **rest.losses} == pytest.approx(whole.losses, rel=1e-5)
    assert sorted(rest.losses) == [5, 6, 7, 8]


def test_what_fills_a_batch_has_no_loss() -> None:
    """Each epoch holds every sample once; the places beyond are filled."""
    order = shuffled(10, 12, seed=1)
    for epoch in range(3):
        drawn = [order(epoch * 12 + place) for place in range(12)]
        assert sorted(drawn) == [FILLER, FILLER, *range(10)]
        assert drawn[10:] == [FILLER, FILLER]
    last = Sample(np.arange(5), np.ones(5, dtype=bool))
    dataset = FinetuningDataset([last], pad_id=0)
    assert dataset[0]["loss_mask"].sum() == 4
    assert dataset[FILLER]["loss_mask"].sum() == 0
    assert np.array_equal(dataset[FILLER]["tokens"], dataset[0]["tokens"])


def test_another_number_of_iterations_is_refused(sentence: Sentence) -> None:
    config = TrainingConfig(num_epochs=2.5, global_batch_size=4, train_iters=7)
    config.finalize()
    with pytest.raises(AssertionError) as caught:
        config.resolve_epochs(10)
    sentence(caught)


@every(
    "fields",
    [
        {"num_epochs": 0},
        {"num_epochs": 1, "train_samples": 8},
        {"num_epochs": 1, "rampup_batch_size": [4, 4, 8]},
        {"num_epochs": 1, "global_batch_size": None},
    ],
)
def test_what_epochs_do_not_go_with(sentence: Sentence, fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError) as caught:
        TrainingConfig(**{"global_batch_size": 4, **fields}).finalize()
    sentence(caught)


def test_data_without_an_end_have_no_epochs(sentence: Sentence) -> None:
    class Container:
        train = TrainingConfig(num_epochs=1, global_batch_size=4)
        dataset = MockGPTDatasetConfig(seq_length=8, random_seed=1)

    with pytest.raises(ValueError, match=r"num_epochs") as caught:
        check_epochs(Container())  # type: ignore[arg-type]
    sentence(caught)
