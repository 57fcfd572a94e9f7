"""What a training run is configured with, and the reader of its file."""

from cloudai_mbridge.training.config.load import ConfigError, config_from_dict, load_config
from cloudai_mbridge.training.config.sections import (
    ConfigContainer,
    DatasetConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    ModelConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
)

__all__ = [
    "ConfigContainer",
    "ConfigError",
    "DatasetConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RNGConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "config_from_dict",
    "load_config",
]
