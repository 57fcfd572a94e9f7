"""The configuration of a training run: every public class and function of Megatron-Bridge's `training.config`.

A name is imported when it is first asked for, so that one small class does not load torch and Megatron-Core.

"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
    from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.config.dataset import (
        DataloaderConfig,
        DatasetBuildContext,
        DatasetProvider,
        GPTDatasetConfig,
        MockGPTDatasetConfig,
    )
    from cloudai_mbridge.training.config.ddp import DistributedDataParallelConfig
    from cloudai_mbridge.training.config.dist import DistributedInitConfig
    from cloudai_mbridge.training.config.finetuning import (
        FinetuningDatasetConfig,
        GPTFIMDatasetConfig,
        PackedSequenceSpecs,
    )
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
    from cloudai_mbridge.training.config.summary import (
        _get_key_config_values,
        _get_mcore_transformer_parent,
        _get_non_default_values,
    )
    from cloudai_mbridge.training.config.train import TrainingConfig, ValidationConfig
    from cloudai_mbridge.training.config.update import (
        _validate_and_sync_distributed_optimizer_settings,
        mimo_runtime_config_update,
        runtime_config_update,
    )
    from cloudai_mbridge.training.config.validate import (
        _validate_fine_grained_activation_offloading,
        _validate_mixed_precision_consistency,
    )
    from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
    from cloudai_mbridge.training.tokenizers.config import TokenizerConfig

__all__ = [
    "CheckpointConfig",
    "CommOverlapConfig",
    "ConfigContainer",
    "DataloaderConfig",
    "DatasetBuildContext",
    "DatasetProvider",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "FaultToleranceConfig",
    "FinetuningDatasetConfig",
    "GPTDatasetConfig",
    "GPTFIMDatasetConfig",
    "InProcessRestartConfig",
    "LoggerConfig",
    "MixedPrecisionConfig",
    "MockGPTDatasetConfig",
    "NVRxStragglerDetectionConfig",
    "OptimizerConfig",
    "OptimizerConfigOverrideProvider",
    "OptimizerConfigOverrideProviderContext",
    "PackedSequenceSpecs",
    "ProfilingConfig",
    "RNGConfig",
    "RerunStateMachineConfig",
    "SchedulerConfig",
    "StragglerDetectionConfig",
    "TensorInspectConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "_get_key_config_values",
    "_get_mcore_transformer_parent",
    "_get_non_default_values",
    "_validate_and_sync_distributed_optimizer_settings",
    "_validate_fine_grained_activation_offloading",
    "_validate_mixed_precision_consistency",
    "mimo_runtime_config_update",
    "runtime_config_update",
]

_HOMES = {
    "cloudai_mbridge.training.comm_overlap": ("CommOverlapConfig",),
    ".checkpoint": ("CheckpointConfig",),
    ".container": ("ConfigContainer",),
    ".dataset": (
        "DataloaderConfig",
        "DatasetBuildContext",
        "DatasetProvider",
        "GPTDatasetConfig",
        "MockGPTDatasetConfig",
    ),
    ".ddp": ("DistributedDataParallelConfig",),
    ".dist": ("DistributedInitConfig",),
    ".finetuning": ("FinetuningDatasetConfig", "GPTFIMDatasetConfig", "PackedSequenceSpecs"),
    ".logger": ("LoggerConfig",),
    ".optimizer": ("OptimizerConfig", "OptimizerConfigOverrideProvider", "OptimizerConfigOverrideProviderContext"),
    ".profiling": ("ProfilingConfig", "TensorInspectConfig"),
    ".rerun": ("RerunStateMachineConfig",),
    ".resilience": (
        "FaultToleranceConfig",
        "InProcessRestartConfig",
        "NVRxStragglerDetectionConfig",
        "StragglerDetectionConfig",
    ),
    ".rng": ("RNGConfig",),
    ".scheduler": ("SchedulerConfig",),
    ".summary": ("_get_key_config_values", "_get_mcore_transformer_parent", "_get_non_default_values"),
    ".train": ("TrainingConfig", "ValidationConfig"),
    ".update": (
        "_validate_and_sync_distributed_optimizer_settings",
        "mimo_runtime_config_update",
        "runtime_config_update",
    ),
    ".validate": ("_validate_fine_grained_activation_offloading", "_validate_mixed_precision_consistency"),
    "cloudai_mbridge.training.mixed_precision": ("MixedPrecisionConfig",),
    "cloudai_mbridge.training.tokenizers.config": ("TokenizerConfig",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
