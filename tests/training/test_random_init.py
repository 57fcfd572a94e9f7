"""Replicas that draw from seeds of their own: the same weights, other dropout, and checkpoints that keep all states."""

from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.process

STEPS = {"train_iters": 4, "micro_batch_size": 1, "global_batch_size": 4}


def test_replicas_drop_out_differently_and_resume_as_they_were(train: Any) -> None:
    sections = {
        "model": {"num_layers": 2, "hidden_dropout": 0.2},
        "train": STEPS,
        "rng": {"data_parallel_random_init": True},
        "checkpoint": {"save": "ckpt", "save_interval": 2},
    }
    whole = train(2, sections).losses
    resumed = train(2, sections, "checkpoint.load=ckpt", "checkpoint.ckpt_step=2").losses
    assert resumed == {step: whole[step] for step in (3, 4)}
    alike = train(2, {**sections, "rng": {}, "checkpoint": {}}).losses
    assert alike[1] == pytest.approx(whole[1], abs=0.2)
    assert alike[1] != whole[1]
    plain = {**sections, "model": {"num_layers": 2}, "checkpoint": {}}
    assert train(2, plain).losses == train(2, {**plain, "rng": {}}).losses
