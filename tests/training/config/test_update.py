"""The final state of a configuration: what is applied, in which order, and how often it may be."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
from cloudai_mbridge.training.config import (
    ConfigContainer,
    TrainingConfig,
    _validate_and_sync_distributed_optimizer_settings,
    mimo_runtime_config_update,
    runtime_config_update,
)
from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config


class _Recorder:
    """A section that records its calls under its name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls
        self.data_parallel_size: int | None = None

    def finalize(self) -> None:
        self._calls.append(f"{self._name}.finalize")

    def setup(self, *sections: Any) -> None:
        self._calls.append(f"{self._name}.setup{len(sections)}@{self.data_parallel_size}")


def test_precision_then_size_then_overlap_then_rules(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    precision, config.comm_overlap = MixedPrecisionConfig(), _Recorder("overlap", calls)
    config.mixed_precision = precision
    monkeypatch.setattr(precision, "finalize", lambda: calls.append("precision.finalize"))
    monkeypatch.setattr(precision, "setup", lambda *s: calls.append("precision.setup"))
    monkeypatch.setattr(config, "validate", lambda: calls.append("validate"))
    runtime_config_update(config)
    assert calls == ["precision.finalize", "precision.setup", "overlap.finalize", "overlap.setup3@4", "validate"]
    assert config.data_parallel_size == 4


def test_without_precision_and_overlap(config: Any) -> None:
    before = (config.model.params_dtype, config.ddp.grad_reduce_in_fp32)
    runtime_config_update(config)
    assert config.data_parallel_size == 1
    assert (config.model.params_dtype, config.ddp.grad_reduce_in_fp32) == before


@pytest.mark.parametrize("name", ["bf16_mixed", "bf16-mixed"])
def test_a_precision_recipe_by_name(name: str, config: Any) -> None:
    config.mixed_precision = name
    config.model.fp16 = config.optimizer.fp16 = True  # the recipe sets it to False, before the rules see two halves
    runtime_config_update(config)
    assert isinstance(config.mixed_precision, MixedPrecisionConfig)
    assert (config.model.bf16, config.model.params_dtype, config.optimizer.bf16) == (True, torch.bfloat16, True)
    assert config.ddp.grad_reduce_in_fp32 is True


def test_an_unknown_recipe_changes_nothing(config: Any) -> None:
    config.mixed_precision = "bf17_mixed"
    with pytest.raises(ValueError, match="bf16_mixed"):
        runtime_config_update(config)
    assert config.mixed_precision == "bf17_mixed"
    assert not hasattr(config, "data_parallel_size")


def test_overlap_sees_the_data_parallel_size(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    runtime_config_update(config)
    assert (config.comm_overlap.data_parallel_size, config.ddp.overlap_grad_reduce) == (2, True)


@pytest.mark.parametrize("section", ["ddp", "optimizer"])
@pytest.mark.parametrize("name", ["use_distributed_optimizer", "overlap_param_gather"])
def test_what_optimizer_and_ddp_share_is_on_in_both(config: Any, section: str, name: str) -> None:
    setattr(getattr(config, section), name, True)
    is_usual = (section, name) == ("ddp", "overlap_param_gather")
    with nullcontext() if is_usual else pytest.warns(UserWarning, match=f"{name}=.*: both are set to True"):
        runtime_config_update(config)
    assert (getattr(config.ddp, name), getattr(config.optimizer, name)) == (True, True)


@pytest.mark.parametrize(("scale", "is_checked"), [(None, False), (1024.0, True)])
def test_a_dynamic_loss_scale_needs_overflow(
    config: Any, scale: float | None, is_checked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config.mixed_precision = dataclasses.replace(get_mixed_precision_config("fp16_mixed"), loss_scale=scale)
    config.ddp.check_for_nan_in_grad = True
    runtime_config_update(config)
    assert ("switched off: fp16" in capsys.readouterr().out) is not is_checked
    assert (config.ddp.check_for_nan_in_grad, config.rerun_state_machine.check_for_nan_in_loss) == (is_checked,) * 2


@pytest.mark.parametrize("samples", [False, True])
def test_the_update_can_be_repeated(samples: bool, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    if samples:
        config.train = TrainingConfig(train_samples=40, micro_batch_size=1, global_batch_size=4)
    config.scheduler.lr_decay_style = "WSD"
    config.mixed_precision, config.comm_overlap = "bf16_mixed", CommOverlapConfig(tp_comm_overlap=False)
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    runtime_config_update(config)
    once = repr(config)
    runtime_config_update(config)
    assert repr(config) == once
    assert config.train.train_iters == 10


def test_a_repeated_update_sees_a_new_layout(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    runtime_config_update(config)
    config.model.tensor_model_parallel_size = 2
    runtime_config_update(config)
    assert config.data_parallel_size == 2


def test_mimo_finalizes_what_does_not_depend_on_the_model(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    sections = ["optimizer", "ddp", "logger", "train", "scheduler", "checkpoint"]
    for name in [
        f.name for f in dataclasses.fields(ConfigContainer) if dataclasses.is_dataclass(getattr(config, f.name))
    ]:
        monkeypatch.setattr(getattr(config, name), "finalize", lambda name=name: called.append(name), raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    mimo_runtime_config_update(config)
    assert called == sections
    assert config.data_parallel_size == 1


def test_mimo_leaves_precision_and_overlap_alone(config: Any) -> None:
    config.mixed_precision, config.comm_overlap = "bf16_mixed", CommOverlapConfig(tp_comm_overlap=False)
    mimo_runtime_config_update(config)
    assert (config.mixed_precision, config.model.bf16) == ("bf16_mixed", False)
    assert config.comm_overlap.data_parallel_size is None


def test_mimo_optimizer_and_ddp_need_no_finalize(config: Any) -> None:
    config.optimizer = SimpleNamespace(use_distributed_optimizer=False)
    config.ddp = SimpleNamespace(use_distributed_optimizer=False)
    mimo_runtime_config_update(config)


def test_mimo_checks_deterministic_mode_and_syncs_the_optimizer(config: Any) -> None:
    config.optimizer.use_distributed_optimizer = True
    config.model.deterministic_mode, config.model.cross_entropy_loss_fusion = True, True
    with (
        pytest.warns(UserWarning, match="use_distributed_optimizer"),
        pytest.raises(AssertionError, match="fused cross entropy"),
    ):
        mimo_runtime_config_update(config)
    assert config.ddp.use_distributed_optimizer is True


def test_mimo_can_be_repeated_for_a_sample_based_run(make_config: Callable[..., Any]) -> None:
    config = make_config(train=TrainingConfig(train_samples=40, micro_batch_size=1, global_batch_size=4))
    for _ in range(2):
        mimo_runtime_config_update(config)
    assert config.train.train_iters == 10


@pytest.mark.parametrize("both", [True, False])
def test_equal_settings_of_the_distributed_optimizer_are_left(both: bool, config: Any) -> None:
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = both
    _validate_and_sync_distributed_optimizer_settings(config)  # and no warning, which would be an error here
    assert (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer) == (both, both)


def test_only_rank_0_warns(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    config.ddp.use_distributed_optimizer = True
    config.validate()
    assert config.optimizer.use_distributed_optimizer is True
