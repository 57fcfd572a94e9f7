"""Each rule of `finalize`: the last legal value, the first illegal one, and the kind of error."""

import copy
import logging
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.cases import every
from tests.golden import Sentence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from megatron.core.utils import is_torch_min_version

    from cloudai_mbridge.training.compat.versions import installed_release
    from cloudai_mbridge.training.config import optimizer as optimizer_module
    from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
    from cloudai_mbridge.training.config.ddp import DistributedDataParallelConfig
    from cloudai_mbridge.training.config.logger import LoggerConfig
    from cloudai_mbridge.training.config.optimizer import OptimizerConfig
    from cloudai_mbridge.training.config.profiling import ProfilingConfig, TensorInspectConfig
    from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig
    from cloudai_mbridge.training.config.train import TrainingConfig


def _nvrx(**fields: Any) -> NVRxStragglerDetectionConfig:
    return NVRxStragglerDetectionConfig(enabled=True, **fields)


def _fsdp(**fields: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("*.bias",), **fields)


LEGAL = [
    ProfilingConfig(profile_step_start=0, profile_step_end=0),
    ProfilingConfig(use_nsys_profiler=True),
    ProfilingConfig(use_pytorch_profiler=True),
    NVRxStragglerDetectionConfig(report_time_interval=-1.0),  # rules hold for an enabled one only
    _nvrx(calc_relative_gpu_perf=False),
    _nvrx(calc_individual_gpu_perf=False),
    _nvrx(gpu_relative_perf_threshold=0.0, gpu_individual_perf_threshold=1.0),
    SchedulerConfig(),
    SchedulerConfig(start_weight_decay=0.0, end_weight_decay=0.0),
    SchedulerConfig(end_weight_decay=-1.0),  # Megatron-Bridge looks at the end only where there is a start
    SchedulerConfig(override_opt_param_scheduler=True),
    SchedulerConfig(use_checkpoint_opt_param_scheduler=True),
    SchedulerConfig(lr_decay_iters=10, lr_warmup_iters=1, lr_wsd_decay_iters=1, lr_warmup_samples=0),
    SchedulerConfig(lr_decay_samples=10, lr_warmup_samples=1, lr_wsd_decay_samples=1, lr_warmup_iters=0),
    SchedulerConfig(lr_warmup_fraction=0.1, lr_decay_iters=10),
    LoggerConfig(),
    LoggerConfig(mlflow_experiment="", comet_project=""),
    CheckpointConfig(),
    CheckpointConfig(async_strategy="mcore", save="x", async_save=True),
    CheckpointConfig(use_persistent_ckpt_worker=False),
    CheckpointConfig(load="x", ckpt_step=0),
    CheckpointConfig(load_main_params_from_ckpt=True, load_optim=False),
    CheckpointConfig(dist_ckpt_optim_fully_reshardable=True),
    CheckpointConfig(distrib_optim_fully_reshardable_mem_efficient=True),
    TrainingConfig(train_iters=1),
    TrainingConfig(train_samples=4, global_batch_size=4),
    DistributedDataParallelConfig(),
    DistributedDataParallelConfig(reuse_grad_buf_for_mxfp8_param_ag=True, fp8_param_gather=True),
    DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    _fsdp(),
    OptimizerConfig(),
]

ILLEGAL = [
    (ProfilingConfig(use_nsys_profiler=True, use_pytorch_profiler=True), AssertionError),
    (ProfilingConfig(profile_step_start=-1), AssertionError),
    (ProfilingConfig(profile_step_end=-1), AssertionError),
    (ProfilingConfig(profile_step_end=9), AssertionError),
    (_nvrx(calc_relative_gpu_perf=False, calc_individual_gpu_perf=False), ValueError),
    (_nvrx(report_time_interval=0.0), ValueError),
    (_nvrx(report_time_interval=float("nan")), ValueError),
    (_nvrx(gpu_relative_perf_threshold=1.01), ValueError),
    (_nvrx(gpu_individual_perf_threshold=-0.01), ValueError),
    (SchedulerConfig(start_weight_decay=-0.1, end_weight_decay=0.1), AssertionError),
    (SchedulerConfig(start_weight_decay=0.1), AssertionError),
    (SchedulerConfig(start_weight_decay=0.1, end_weight_decay=0.09), AssertionError),
    (SchedulerConfig(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True), AssertionError),
    (SchedulerConfig(lr_decay_iters=1, lr_decay_samples=1), AssertionError),
    (SchedulerConfig(lr_decay_iters=0, lr_wsd_decay_samples=0), AssertionError),
    (SchedulerConfig(lr_warmup_iters=1, lr_wsd_decay_samples=1), AssertionError),
    (SchedulerConfig(lr_wsd_decay_iters=1, lr_warmup_samples=1), AssertionError),
    (SchedulerConfig(lr_warmup_fraction=0.0, lr_warmup_iters=1), AssertionError),
    (SchedulerConfig(lr_warmup_fraction=0.1, lr_warmup_samples=1), AssertionError),
    (LoggerConfig(mlflow_experiment="e"), ValueError),
    (LoggerConfig(comet_project="p"), ValueError),
    (CheckpointConfig(pretrained_checkpoint="/nowhere"), AssertionError),
    (CheckpointConfig(load_main_params_from_ckpt=True), AssertionError),
    (CheckpointConfig(async_save=True), AssertionError),
    (CheckpointConfig(async_save=True, save="x", use_persistent_ckpt_worker=False), AssertionError),
    (CheckpointConfig(ckpt_step=0), ValueError),
    (
        CheckpointConfig(dist_ckpt_optim_fully_reshardable=True, distrib_optim_fully_reshardable_mem_efficient=True),
        AssertionError,
    ),
    (TrainingConfig(), AssertionError),
    (TrainingConfig(train_iters=3, train_samples=8, global_batch_size=4), AssertionError),
    (TrainingConfig(train_samples=0, global_batch_size=4), AssertionError),
    (TrainingConfig(train_samples=8, global_batch_size=4, rampup_batch_size=[1, 1, 8]), AssertionError),
    (TrainingConfig(train_samples=8), AssertionError),
    (TrainingConfig(train_samples=8, global_batch_size=0), AssertionError),
    (TrainingConfig(train_samples=3, global_batch_size=4), AssertionError),
    (DistributedDataParallelConfig(reuse_grad_buf_for_mxfp8_param_ag=True), AssertionError),
    (_fsdp(grad_reduce_in_fp32=True), AssertionError),
    (OptimizerConfig(main_grads_dtype=torch.bfloat16), AssertionError),
    (OptimizerConfig(main_params_dtype=torch.float16), AssertionError),
    (OptimizerConfig(exp_avg_dtype=torch.bfloat16), AssertionError),
    (OptimizerConfig(exp_avg_sq_dtype=torch.bfloat16), AssertionError),
    (
        OptimizerConfig(use_precision_aware_optimizer=True, optimizer="sgd", use_distributed_optimizer=True),
        AssertionError,
    ),
    (OptimizerConfig(use_precision_aware_optimizer=True), AssertionError),
]


@every("config", LEGAL)
def test_legal_and_again(config: Any) -> None:
    config = copy.deepcopy(config)
    config.finalize()
    once = copy.deepcopy(config)
    config.finalize()
    assert config == once


@every(("config", "error"), ILLEGAL)
def test_illegal(sentence: Sentence, config: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        copy.deepcopy(config).finalize()
    sentence(caught, core=r"(?<=_dtype) can only be .*|^Reuse grad .*")
    assert type(caught.value) is error


@every(
    ("config", "change"),
    [
        (CheckpointConfig(ckpt_step=1), {"load": "x"}),
        (DistributedDataParallelConfig(reuse_grad_buf_for_mxfp8_param_ag=True), {"fp8_param_gather": True}),
        (_fsdp(grad_reduce_in_fp32=True), {"grad_reduce_in_fp32": False}),
        (OptimizerConfig(exp_avg_dtype=torch.bfloat16), {"exp_avg_dtype": torch.float32}),
    ],
)
def test_what_changes_before_finalize_counts(config: Any, change: dict[str, Any]) -> None:
    """The other way round too: what was legal when it was made is checked as it is now."""
    config = copy.deepcopy(config)
    before = {name: getattr(config, name) for name in change}
    for name, value in change.items():
        setattr(config, name, value)
    config.finalize()
    for name, value in before.items():
        setattr(config, name, value)
    with pytest.raises((AssertionError, ValueError)):
        config.finalize()


# training length


@every(("samples", "batch", "iters"), [(4, 4, 1), (7, 4, 1), (8, 4, 2)])
def test_samples_become_iterations(samples: int, batch: int, iters: int) -> None:
    config = TrainingConfig(train_samples=samples, global_batch_size=batch)
    config.finalize()
    assert (config.train_iters, config.train_samples) == (iters, samples)


def test_a_second_finalize_derives_anew(sentence: Sentence) -> None:
    config = TrainingConfig(train_samples=8, global_batch_size=4)
    config.finalize()
    config.global_batch_size = 2
    config.finalize()
    assert config.train_iters == 4
    config.train_iters = 5
    with pytest.raises(AssertionError) as caught:
        config.finalize()
    sentence(caught)


def test_a_finalized_config_can_be_made_again_from_its_fields(sentence: Sentence) -> None:
    config = TrainingConfig(train_samples=8, global_batch_size=4)
    config.finalize()
    again = replace(config)
    again.finalize()
    assert again == config
    with pytest.raises(AssertionError) as caught:
        replace(config, global_batch_size=2).finalize()
    sentence(caught)


@pytest.mark.parametrize(("rank", "expected"), [(None, 1), ("0", 1), ("1", 0)])
def test_derived_iterations_are_told_once_on_rank_0(
    rank: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    config = TrainingConfig(train_samples=8, global_batch_size=4)
    with caplog.at_level(logging.INFO, "cloudai_mbridge.training.config.train"):
        config.finalize()
        config.finalize()
    assert [record.getMessage() for record in caplog.records] == ["train_iters is 2: 8 samples // 4"] * expected


# checkpoints


def test_an_unknown_async_strategy_is_refused_when_made_and_when_changed(sentence: Sentence) -> None:
    with pytest.raises(AssertionError) as caught:
        CheckpointConfig(async_strategy="fast")
    sentence(caught)
    config = CheckpointConfig()
    config.async_strategy = "fast"
    with pytest.raises(AssertionError, match="async_strategy"):
        config.finalize()


def test_a_pretrained_checkpoint_that_exists(tmp_path: Path) -> None:
    CheckpointConfig(pretrained_checkpoint=str(tmp_path)).finalize()


# loggers


@every(
    ("field", "value", "package"),
    [
        ("mlflow_run_name", "r", "mlflow"),
        ("mlflow_tracking_uri", "u", "mlflow"),
        ("mlflow_tags", {"a": "b"}, "mlflow"),
        ("comet_experiment_name", "n", "comet_ml"),
        ("comet_workspace", "w", "comet_ml"),
        ("comet_api_key", "k", "comet_ml"),
        ("comet_tags", ["a"], "comet_ml"),
    ],
)
def test_a_service_needs_its_package(field: str, value: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoggerConfig(**{field: value})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"{field}: the package {package} is not installed") as caught:
        config.finalize()
    assert caught.value.name == package
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    config.finalize()


def test_a_package_is_looked_up_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    (tmp_path / "mlflow.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    LoggerConfig(mlflow_experiment="e", mlflow_run_name="r").finalize()
    assert "mlflow" not in sys.modules


# tensor inspection


def test_installed_debug_features_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("transformer_engine.debug.features")
    fake.__path__ = ["/te/debug/features"]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    for config, expected in (
        (TensorInspectConfig(enabled=True), ["/te/debug/features"]),
        (TensorInspectConfig(enabled=True, feature_dirs=["/mine"]), ["/mine"]),
        (TensorInspectConfig(), None),
    ):
        config.finalize()
        assert config.feature_dirs == expected


def test_a_transformer_engine_that_cannot_be_imported_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.debug.features", None)
    config = TensorInspectConfig(enabled=True)
    config.finalize()
    assert config.feature_dirs is None


# gradient reduction


@every(
    ("value", "is_refused"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128,expandable_segments:True", True),
        ("expandable_segments:False", False),
    ],
)
def test_user_buffers_exclude_expandable_segments(
    value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    config = DistributedDataParallelConfig(nccl_ub=True)
    is_fine_there = installed_release() in ("0.18", "0.19") and is_torch_min_version("2.11.0a0")
    if not is_refused or is_fine_there:
        config.finalize()
        return
    with pytest.raises(ValueError, match="expandable_segments"):
        config.finalize()


def test_patterns_that_megatron_core_would_ignore_are_told(caplog: pytest.LogCaptureFixture) -> None:
    base = DistributedDataParallelConfig.__mro__[1]
    _fsdp().finalize()
    is_known = hasattr(base, "param_name_patterns_for_fp32_local_accumulation")
    assert ("has no effect" in caplog.text) is not is_known


# optimizer


PRECISION_AWARE = OptimizerConfig(
    use_precision_aware_optimizer=True, use_distributed_optimizer=True, exp_avg_dtype=torch.bfloat16
)


@pytest.mark.parametrize("offload", [False, True])
def test_a_precision_aware_optimizer_needs_transformer_engine(
    sentence: Sentence, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "have_te", lambda: False)
    with pytest.raises(RuntimeError) as caught:
        replace(PRECISION_AWARE, optimizer_cpu_offload=offload).finalize()
    sentence(caught)


class _FakeFusedAdam:
    def __init__(self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any):
        """Take the arguments that Megatron-Core looks for."""


class _FakeOldFusedAdam:
    def __init__(self, master_weight_dtype: Any):
        """Take less."""


@pytest.mark.parametrize(("adam", "is_enough"), [(_FakeFusedAdam, True), (_FakeOldFusedAdam, False)])
def test_the_fused_adam_must_know_the_dtypes(adam: type, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = adam  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.7.0"))
    config = replace(PRECISION_AWARE)
    if is_enough:
        config.finalize()
        assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 is True
        return
    with pytest.raises(AssertionError, match="doesn't support"):
        config.finalize()


def test_mxfp8_without_buffer_reuse_warns() -> None:
    with pytest.warns(UserWarning, match="mxfp8 without using reuse_grad_buf_for_mxfp8_param_ag"):
        OptimizerConfig(fp8_recipe="mxfp8").finalize()
    OptimizerConfig(fp8_recipe="mxfp8", reuse_grad_buf_for_mxfp8_param_ag=True).finalize()
