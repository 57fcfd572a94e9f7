"""The configuration of a training run: every public class and function of Megatron-Bridge's `training.config`.

A name is imported on first access, so that one small class does not load torch and Megatron-Core.
"""

import importlib
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.training.schema.known_names import CONFIG_MODULES
from cloudai_mbridge.training.upstream import missing

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
    from cloudai_mbridge.training.config.rules.validate import (
        _validate_and_sync_distributed_optimizer_settings,
        _validate_fine_grained_activation_offloading,
        _validate_mixed_precision_consistency,
        mimo_runtime_config_update,
        runtime_config_update,
    )
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig
    from cloudai_mbridge.training.config.text.summary import (
        _get_key_config_values,
        _get_mcore_transformer_parent,
        _get_non_default_values,
    )
    from cloudai_mbridge.training.config.train import TrainingConfig, ValidationConfig
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

_TRAINING = __name__.rpartition(".")[0]
_HOME_OF = {name: f"{_TRAINING}.{module}" for module, names in CONFIG_MODULES.items() for name in names} | {
    "DatasetBuildContext": f"{__name__}.dataset",
    "OptimizerConfigOverrideProviderContext": f"{__name__}.optimizer",
    "_get_key_config_values": f"{__name__}.text.summary",
    "_get_mcore_transformer_parent": f"{__name__}.text.summary",
    "_get_non_default_values": f"{__name__}.text.summary",
    "_validate_and_sync_distributed_optimizer_settings": f"{__name__}.rules.validate",
    "_validate_fine_grained_activation_offloading": f"{__name__}.rules.validate",
    "_validate_mixed_precision_consistency": f"{__name__}.rules.validate",
    "mimo_runtime_config_update": f"{__name__}.rules.validate",
    "runtime_config_update": f"{__name__}.rules.validate",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing(__name__, name)
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
