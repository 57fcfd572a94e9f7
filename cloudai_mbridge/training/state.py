"""State that a run carries from step to step, under the names of Megatron-Bridge's `training.state`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from megatron.core.energy_monitor import EnergyMonitor

from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.checkpointing.save import open_queue
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.process.signal_handler import DistributedSignalHandler
from cloudai_mbridge.training.process.timers import MonotonicTimers
from cloudai_mbridge.training.reporting import loggers
from cloudai_mbridge.training.reporting.lengths import PackedLengths
from cloudai_mbridge.training.resilience.straggler import GuardedStragglerDetector, straggler_timer
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer

_DTYPES = {int: torch.int64, bool: torch.bool}
_FLOPS = "floating_point_operations_so_far"  # soon beyond int64


@dataclass
class TrainState:
    """Progress counters of the whole job: optimizer steps, sequences, model FLOPs; and the phases to run."""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: int = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return 0-d tensors: int64 for counters, float64 for the FLOPs, bool for the phases."""
        return {
            each.name: torch.tensor(
                getattr(self, each.name),
                dtype=torch.float64 if each.name == _FLOPS else _DTYPES[each.type],  # type: ignore[index]
            )
            for each in fields(self)
        }

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load the result of `state_dict`. Raises KeyError: a counter is missing; nothing is loaded then."""
        values = {each.name: state_dict[each.name].item() for each in fields(self)}
        for name, value in values.items():
            setattr(self, name, int(value) if name == _FLOPS else value)


@dataclass
class FaultToleranceState:
    """Observations of the fault-tolerance package's sections so far."""

    ft_state_path: str | None = None
    is_persistent_chkpt_loaded: bool = False
    is_async_chkpt_enabled: bool = False
    is_calculating_timeouts: bool = False
    is_setup_section_open: bool = False
    seen_checkpoints_cnt: int = 0
    seen_tr_iters_cnt: int = 0
    curr_eval_iter_idx: int = 0


class GlobalState:
    """The run's configuration and progress, and objects opened once per process, on first use.

    The loggers are open on the last rank only and None elsewhere. Setting `cfg` installs the signal handler, if the
    configuration enables it.
    """

    def __init__(self, cfg: ConfigContainer | None = None) -> None:
        self.start_time = time.time()
        self._cfg: ConfigContainer | None = None
        self.signal_handler: DistributedSignalHandler | None = None
        self.callback_manager: CallbackManager | None = None
        self._reset()
        if cfg is not None:
            self.cfg = cfg

    def reset_for_restart(self) -> None:
        """Drop everything but the configuration: an in-process restart sets up again."""
        self._reset()  # also for a subclass that adds to this, before its own fields exist

    def _reset(self) -> None:
        self.train_state = TrainState()
        self._tokenizer: Any = None
        self.nvrx_straggler_manager: Any = None
        self.fault_tolerance_state = FaultToleranceState()
        self.rank_monitor_client: Any = None
        self.async_calls_queue: Any = None
        self.checkpoint_manager: Any = None  # of checkpoint.custom_manager_class
        self.completed_saves: list[Callable[[], None]] = []  # in the background, whose callbacks are still to be called
        self.flops_at_start = 0.0  # of the whole job, when this process began to train
        self.last_saved_step: int | None = None  # by a checkpoint that outlives the job
        self.step_seq_length: int | None = None  # of the step that was run last; None: the model's
        self.packed = PackedLengths()  # of the sequences of the step
        self.max_attention_logit: float | None = None  # of the step that was run last; None: not configured
        for name, value in vars(GlobalState).items():
            if isinstance(value, cached_property):  # opened on first use
                self.__dict__.pop(name, None)

    @property
    def cfg(self) -> ConfigContainer:
        """The validated configuration. Raises AttributeError: none was set."""
        if self._cfg is None:
            raise AttributeError("GlobalState.cfg is not set")
        return self._cfg

    @cfg.setter
    def cfg(self, value: ConfigContainer) -> None:
        self._cfg = value
        self.signal_handler = DistributedSignalHandler(value.train.exit_signal)
        if self.exits_on_signal:
            self.signal_handler.install()

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer, built on first use. Raises ConfigError: it cannot be built."""
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(self.cfg)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = value

    def initialize_async_checkpoint_worker(self) -> None:
        """Make the queue of saves in the background now, if there will be any. May be called again."""
        if self.cfg.checkpoint.save is not None and self.cfg.checkpoint.async_save:
            open_queue(self)

    @property
    def exits_on_signal(self) -> bool:
        """Whether `exit_signal` makes the run save and leave."""
        return self.cfg.train.exit_signal_handler or self.cfg.train.exit_signal_handler_for_training

    @cached_property
    def timers(self) -> MonotonicTimers:
        """Megatron's timers, at the configured level, on a clock that never jumps."""
        return MonotonicTimers(self.cfg.logger.timing_log_level, self.cfg.logger.timing_log_option)

    @cached_property
    def tensorboard_logger(self) -> Any:
        """A SummaryWriter, or None."""
        return loggers.open_tensorboard(self.cfg)

    @cached_property
    def wandb_logger(self) -> Any:
        """The wandb module with a run open, or None."""
        return loggers.open_wandb(self.cfg)

    @cached_property
    def mlflow_logger(self) -> Any:
        """The mlflow module with a run open, or None."""
        return loggers.open_mlflow(self.cfg)

    @cached_property
    def comet_logger(self) -> Any:
        """A Comet experiment, or None."""
        return loggers.open_comet(self.cfg)

    @cached_property
    def straggler_timer(self) -> GuardedStragglerDetector:
        """Megatron's detector; it stays off without a GPU."""
        return straggler_timer()

    @cached_property
    def energy_monitor(self) -> EnergyMonitor | None:
        """Megatron's reader of the GPU's energy counter, or None."""
        return EnergyMonitor() if self.cfg.logger.log_energy else None

    def open_loggers(self) -> tuple[Any, Any, Any, Any]:
        """Open the logging services now, as the first step is not to wait for them, and return them."""
        return self.tensorboard_logger, self.wandb_logger, self.mlflow_logger, self.comet_logger

    def close(self) -> None:
        """Close the loggers that were opened, and give the signal back. May be called again."""
        names = ("tensorboard_logger", "wandb_logger", "mlflow_logger", "comet_logger")
        loggers.close_loggers(*(self.__dict__.pop(name, None) for name in names))
        if self.signal_handler is not None:
            self.signal_handler.release()
