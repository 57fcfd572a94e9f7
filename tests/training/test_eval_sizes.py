"""Evaluations with batches of their own, from an iteration of their own."""

from typing import Any

import pytest

from tests.training.conftest import Finished, Train

pytestmark = pytest.mark.process
pytest.importorskip("torch")

MODEL = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
SCHEDULE = {"eval_iters": 2, "eval_interval": 2, "start_eval_at_iter": 3, "eval_global_batch_size": 4}


def _validations(done: Finished) -> dict[str, float]:
    lines = [line for line in done.stdout.splitlines() if " validation loss at " in line]
    return {line.split("|")[0].split(" at ")[1].strip(): float(line.split("value: ")[1].split()[0]) for line in lines}


@pytest.mark.parametrize("loader", ["single", "batch"])
def test_batches_of_their_own(train: Train, loader: str) -> None:
    def run(processes: int, **sizes: Any) -> Finished:
        sections = {"model": MODEL, "train": {"train_iters": 4}, "validation": {**SCHEDULE, **sizes}}
        return train(processes, {**sections, "dataset": {"dataloader_type": loader}})

    by_two = run(2, eval_micro_batch_size=2)
    assert [*_validations(by_two)] == ["iteration 4", "iteration 4 on validation set", "iteration 4 on test set"]
    assert _validations(by_two) == pytest.approx(_validations(run(1)), abs=2e-5)
    assert _validations(by_two) != pytest.approx(_validations(run(1, eval_global_batch_size=8)), abs=2e-5)


def test_a_size_that_ranks_cannot_share(train: Train) -> None:
    done = train(2, {"model": MODEL, "validation": {"eval_global_batch_size": 3}}, code=1)
    assert "validation.eval_global_batch_size = 3 is not a multiple of eval_micro_batch_size x" in done.stderr
