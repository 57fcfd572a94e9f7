"""The line of the memory in use. Allocator and process group are made up: this machine has no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.reporting import training_log as module
from cloudai_mbridge.training.reporting.training_log import _due, _print_memory_in_use


def _logger(**keys: Any) -> Any:
    services = dict.fromkeys(("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project"))
    plain = {"log_interval": 10, "tensorboard_log_interval": 3, "log_memory_interval": None, "memory_keys": None}
    return SimpleNamespace(**{**services, **plain, "skip_train_metrics_log": False, **keys})


@pytest.mark.parametrize(
    ("replica", "out"), [(0, "[Rank 3] (after 7 iterations) memory (GB) | a: 1.5 | b: 2\n"), (1, "")]
)
def test_the_first_replica_prints_its_memory(
    replica: int, out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.reports, "report_memory", lambda keys: {"a": 1.5, "b": 2})
    monkeypatch.setattr(module.dist, "get_rank", lambda: 3)
    groups = SimpleNamespace(dp=SimpleNamespace(rank=lambda: replica))
    _print_memory_in_use(_logger(), 7, groups)
    assert capsys.readouterr().out == out


def test_without_allocator_there_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    _print_memory_in_use(_logger(memory_keys={"no such statistic": "x"}), 7, None)
    assert capsys.readouterr().out == ""


def test_what_is_due() -> None:
    logger = _logger(comet_project="c", log_memory_interval=4)
    console, loggers, scalars, memory = zip(*(_due(logger, step) for step in (1, 3, 4, 10)), strict=True)
    assert console == (False, False, False, True)
    assert loggers == (True, True, True, True)
    assert scalars == (False, True, False, False)
    assert memory == (False, False, True, False)
    assert _due(_logger(), 3) == (False, False, False, False)
    assert _due(_logger(comet_project="c", skip_train_metrics_log=True), 30) == (True, False, False, False)
