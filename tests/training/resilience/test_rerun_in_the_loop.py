"""Faults injected into real training: exit codes, checkpoints, and that the run goes on from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.compat.versions import installed_release

pytest.importorskip("torch")


def sections(kind: str = "transient_error", rate: int = 0, **config: Any) -> dict[str, Any]:
    rerun: dict[str, Any] = {"rerun_mode": "validate_results", "check_for_nan_in_loss": True}
    rerun |= {"error_injection_type": kind, "error_injection_rate": rate, **config}
    return {
        "train": {"train_iters": 3, "micro_batch_size": 1, "global_batch_size": 4},
        "model": {"num_layers": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1},
        "rerun_state_machine": rerun,
        "checkpoint": {"save": "ckpt", "load": "ckpt"},
    }


def saved_iteration(directory: Path) -> str:
    return (directory / "ckpt" / "latest_checkpointed_iteration.txt").read_text()


def test_transient_error(train: Callable[..., Any], tmp_path: Path) -> None:
    ended = train(1, sections(rate=1), code=17)
    assert "exiting program with code 17 at iteration 1" in ended.stdout
    assert "possible transient error" in ended.stderr
    saves = installed_release() in ("0.16", "0.17")  # newer releases go on from the checkpoint before: there is none
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").exists() == saves
    resumed = train(1, sections())
    (tmp_path / "plain").mkdir()
    plain = train(1, sections(rerun_mode="disabled"), directory=tmp_path / "plain")
    assert resumed.losses == {step: loss for step, loss in plain.losses.items() if step > saves}


@pytest.mark.drill
def test_reproducible_result(train: Callable[..., Any], tmp_path: Path) -> None:
    ended = train(1, sections("persistent_error", rate=1), code=16)
    assert "exiting program with code 16 at iteration 1" in ended.stdout
    assert saved_iteration(tmp_path) == "1"
    again = train(1, sections("persistent_error", rate=1), code=16)  # there is no other device here
    assert "rerun on the device under suspicion" in again.stderr
    assert "iteration 2" in again.stderr
    assert saved_iteration(tmp_path) == "1"


@pytest.mark.drill
def test_determinism_report(train: Callable[..., Any]) -> None:
    ended = train(1, {**sections(rerun_mode="report_determinism_stats"), "checkpoint": {}})
    assert sorted(ended.losses) == [1, 2, 3]
    assert ended.stdout.count("Stats on computation determinism in validation calls") == 1  # every second iteration
    # two questions, the first two iterations, four micro-batches; each computed twice
    assert "found NaN in local forward loss calculation: 8 samples, all identical" in ended.stdout
