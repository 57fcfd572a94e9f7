"""Configuration classes are made as Megatron-Bridge's: by name or position.

Their fields, types and defaults are compared with `schema.json` in test_schema.py, and with the real classes in
tests/interop/test_names.py.
"""

import inspect
import warnings
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from tests.cases import every

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported

    from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
    from cloudai_mbridge.training.config.dataset import (
        DataloaderConfig,
        DatasetBuildContext,
        DatasetProvider,
        GPTDatasetConfig,
        MockGPTDatasetConfig,
    )
    from cloudai_mbridge.training.config.ddp import DistributedDataParallelConfig
    from cloudai_mbridge.training.config.dist import DistributedInitConfig
    from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs
    from cloudai_mbridge.training.config.logger import LoggerConfig
    from cloudai_mbridge.training.config.optimizer import (
        OptimizerConfig,
        OptimizerConfigOverrideProvider,
        OptimizerConfigOverrideProviderContext,
    )
    from cloudai_mbridge.training.config.profiling import ProfilingConfig, TensorInspectConfig
    from cloudai_mbridge.training.config.rerun import RerunStateMachineConfig
    from cloudai_mbridge.training.config.resilience import (
        FaultToleranceConfig,
        InProcessRestartConfig,
        NVRxStragglerDetectionConfig,
        StragglerDetectionConfig,
    )
    from cloudai_mbridge.training.config.rng import RNGConfig
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig
    from cloudai_mbridge.training.config.train import TrainingConfig, ValidationConfig
    from cloudai_mbridge.training.tokenizers.config import TokenizerConfig

KEYWORD_ONLY = (
    *(RNGConfig, ProfilingConfig, TensorInspectConfig, DistributedInitConfig, RerunStateMachineConfig),
    *(StragglerDetectionConfig, TrainingConfig, ValidationConfig, SchedulerConfig, LoggerConfig, CheckpointConfig),
    *(DataloaderConfig, DatasetProvider, FinetuningDatasetConfig),
)
POSITIONAL = (
    *(FaultToleranceConfig, NVRxStragglerDetectionConfig, InProcessRestartConfig, DatasetBuildContext),
    *(OptimizerConfigOverrideProvider, PackedSequenceSpecs, TokenizerConfig),
)


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def _names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


@every("cls", KEYWORD_ONLY)
def test_keyword_only(cls: Any) -> None:
    assert all(field.kw_only for field in fields(cls))
    if cls is not DatasetProvider:
        with pytest.raises(TypeError, match="positional argument"):
            cls(1)


@every("cls", POSITIONAL)
def test_positional(cls: Any) -> None:
    assert not any(field.kw_only for field in fields(cls))


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (DatasetBuildContext(train_samples=1, valid_samples=2, test_samples=3), "train_samples"),
        (
            OptimizerConfigOverrideProviderContext(SchedulerConfig(), OptimizerConfig(), torch.nn.Linear(1, 1)),
            "optimizer_config",
        ),
    ],
    ids=["dataset", "optimizer"],
)
def test_contexts_are_frozen(context: Any, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(context, name, 5)


def test_context_of_the_optimizer_overrides_requires_all() -> None:
    assert _names(OptimizerConfigOverrideProviderContext) == ["scheduler_config", "optimizer_config", "model"]
    assert all(_default(field) is MISSING for field in fields(OptimizerConfigOverrideProviderContext))


@every(
    "cls",
    [
        *(CheckpointConfig, DataloaderConfig, DistributedDataParallelConfig, FinetuningDatasetConfig, GPTDatasetConfig),
        *(LoggerConfig, MockGPTDatasetConfig, NVRxStragglerDetectionConfig, OptimizerConfig, ProfilingConfig),
        *(SchedulerConfig, TensorInspectConfig, TrainingConfig),
    ],
)
def test_finalize_takes_nothing(cls: Any) -> None:
    assert list(inspect.signature(cls.finalize).parameters) == ["self"]


def test_a_dataset_provider_is_abstract() -> None:
    with pytest.raises(TypeError, match="build_datasets"):
        DatasetProvider()  # type: ignore[abstract]


def test_local_rank_is_read_when_the_config_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedInitConfig().local_rank == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert DistributedInitConfig().local_rank == 3
    assert DistributedInitConfig(local_rank=1).local_rank == 1


def test_lazy_init_is_lazy_mpu_init() -> None:
    config = DistributedInitConfig(lazy_mpu_init=True)
    assert config.lazy_init is True
    config.lazy_init = False
    assert config.lazy_mpu_init is False
    assert "lazy_init" not in _names(DistributedInitConfig)
