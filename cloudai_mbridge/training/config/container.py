"""The container of a run's configuration, as Megatron-Bridge's: a section per concern, and the rules that join them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed

from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.config.dataset import DatasetProvider, GPTDatasetConfig
from cloudai_mbridge.training.config.ddp import DistributedDataParallelConfig
from cloudai_mbridge.training.config.dist import DistributedInitConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.logger import LoggerConfig
from cloudai_mbridge.training.config.optimizer import OptimizerConfig, OptimizerConfigOverrideProvider
from cloudai_mbridge.training.config.profiling import ProfilingConfig, TensorInspectConfig
from cloudai_mbridge.training.config.rerun import RerunStateMachineConfig
from cloudai_mbridge.training.config.resilience import (
    FaultToleranceConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    StragglerDetectionConfig,
)
from cloudai_mbridge.training.config.rng import RNGConfig
from cloudai_mbridge.training.config.rules.parallel import check_cp_comm_type
from cloudai_mbridge.training.config.rules.scheduler_steps import (
    calculate_scheduler_steps,
    check_training_scheduler_compatibility,
)
from cloudai_mbridge.training.config.rules.validate import apply_deterministic_mode, validate
from cloudai_mbridge.training.config.scheduler import SchedulerConfig
from cloudai_mbridge.training.config.text.summary import log_non_default_values
from cloudai_mbridge.training.config.train import TrainingConfig, ValidationConfig
from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
from cloudai_mbridge.training.peft.config import AdapterConfig
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig


class _ConfigContainerBase:
    """Plain data, YAML and JSON of a dataclass, and back.

    The reader and writer are imported on use: a run that is configured in code needs no YAML library.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with each section's class under `_target_`."""
        from cloudai_mbridge.training.config.text import serialization

        return serialization.to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a container from the result of `to_dict`. Raises ConfigError: unknown class, unknown or missing key."""
        from cloudai_mbridge.training.config.text import serialization

        return serialization.from_dict(cls, data)

    def to_yaml(self, yaml_path: str | Path | None = None) -> str:
        """Return the container as YAML, also written to `yaml_path` if given."""
        from cloudai_mbridge.training.config.text import serialization

        return serialization.to_yaml(self, yaml_path)

    @classmethod
    def from_yaml(cls, yaml_path: str | Path) -> Self:
        """Read a container from a file that `to_yaml` wrote. Raises ConfigError: unreadable, or as of `from_dict`."""
        from cloudai_mbridge.training.config.text import serialization

        return serialization.from_yaml(cls, yaml_path)

    def print_yaml(self) -> None:
        """Print the container as YAML."""
        print(self.to_yaml(), end="")


@dataclass(kw_only=True)
class ConfigContainer(_ConfigContainerBase):
    """Everything one training run is configured with.

    The sections may be changed freely after construction: nothing is checked or derived before `validate()`, and
    `validate()` may be called again after a change.
    """

    env_vars: dict[str, str | int | float | bool] = field(default_factory=dict)  # set unless the environment has them
    rng: RNGConfig = field(default_factory=RNGConfig)
    rerun_state_machine: RerunStateMachineConfig = field(default_factory=RerunStateMachineConfig)
    train: TrainingConfig
    model: Any  # one of the providers of `training.models`; files may name these only (known_names.FIELD_CLASSES)
    optimizer: OptimizerConfig
    optimizer_config_override_provider: OptimizerConfigOverrideProvider = field(
        default_factory=OptimizerConfigOverrideProvider
    )
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    scheduler: SchedulerConfig
    dataset: GPTDatasetConfig | FinetuningDatasetConfig | DatasetProvider
    logger: LoggerConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    ft: FaultToleranceConfig | None = None
    straggler: StragglerDetectionConfig | None = None
    nvrx_straggler: NVRxStragglerDetectionConfig | None = None
    profiling: ProfilingConfig | None = field(default_factory=ProfilingConfig)
    peft: AdapterConfig | None = None
    comm_overlap: CommOverlapConfig | None = None
    mixed_precision: MixedPrecisionConfig | str | None = None
    tensor_inspect: TensorInspectConfig | None = None
    inprocess_restart: InProcessRestartConfig | None = None

    def get_data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas among `world_size` ranks. Raises AssertionError: not a whole number."""
        m = self.model
        tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
        assert world_size % (tp * pp * cp) == 0, (
            f"world size ({world_size}) is not divisible by {tp * pp * cp} = tensor_model_parallel_size ({tp}) x "
            f"pipeline_model_parallel_size ({pp}) x context_parallel_size ({cp})"
        )
        return int(world_size // (tp * pp * cp))

    def set_data_parallel_size(self) -> None:
        """Set `data_parallel_size` here and on `comm_overlap` from the process group's size, else from torchrun's."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.data_parallel_size: int | None = self.get_data_parallel_size(world_size)
        if self.comm_overlap is not None:
            self.comm_overlap.data_parallel_size = self.data_parallel_size

    @property
    def eval_batch_sizes(self) -> tuple[int, int]:
        """Global and micro-batch size of evaluations, by default as in training."""
        own, train = self.validation, self.train
        global_size = train.global_batch_size if own.eval_global_batch_size is None else own.eval_global_batch_size
        micro_size = train.micro_batch_size if own.eval_micro_batch_size is None else own.eval_micro_batch_size
        return required(global_size), required(micro_size)

    def validate(self) -> None:
        """Finalize the sections, derive values that depend on several sections, and check that they agree.

        AssertionError, ValueError: the first rule that is broken, in the order of `validate.CHECKS`.
        """
        validate(self)

    def log_non_default_values(self) -> None:
        """Print, on rank 0, the differences from Megatron-Core's defaults."""
        log_non_default_values(self)

    # Megatron-Bridge's names
    _validate_and_apply_deterministic_mode = apply_deterministic_mode
    _validate_cp_comm_type = check_cp_comm_type
    _validate_training_scheduler_compatibility = check_training_scheduler_compatibility
    _calculate_scheduler_steps = calculate_scheduler_steps


T = TypeVar("T")


def required(value: T | None) -> T:
    """Return a value that validation has ensured."""
    assert value is not None, "the configuration has not been validated"
    return value
