"""Length of training, batches, conditions for stopping, and validation."""

import logging
import math
import os
import signal
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, batch sizes and exits of the training loop. Batch sizes and `train_samples` count sequences."""

    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: list[int] | None = None  # [start, increment, samples of the ramp]
    step_batch_size_schedule: str | None = None
    decrease_batch_size_if_needed: bool = False  # round down to a multiple of micro batch x data parallel
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    check_weight_hash_across_dp_replicas_interval: int | None = None
    gpu_sniff_test_interval: int | None = None
    train_sync_interval: int | None = None  # synchronise host and device every n iterations
    train_iters: int | None = None
    train_samples: int | None = None
    num_epochs: float | None = None  # passes over fine-tuning data
    exit_interval: int | None = None  # leave after an iteration that n divides
    exit_duration_in_mins: int | None = None
    exit_signal_handler: bool = False  # on `exit_signal`, save and leave
    exit_signal: signal.Signals = signal.SIGTERM
    exit_signal_handler_for_dataloader: bool = False
    exit_signal_handler_for_training: bool = False
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
    iterations_to_skip: list[int] = field(default_factory=list)
    check_optimizer_step_success: bool = True
    skip_sync_grad_norm_across_mp: bool = False
    eval_iters: int | None = None  # deprecated: ValidationConfig
    eval_interval: int | None = None  # deprecated: ValidationConfig
    skip_train: bool | None = None  # deprecated: ValidationConfig

    def __post_init__(self) -> None:
        """Start without a length that `finalize` derived."""
        self._derived_train_iters: int | None = None

    def finalize(self) -> None:
        """Check the length, and derive `train_iters` if given as `train_samples`.

        It may be called again: derived values are derived again, and a pair that agrees (as in a config that was
        saved after this) is not taken for a contradiction. With `num_epochs`, `train_iters` is derived when the data
        have been read.

        AssertionError: none or several of `train_iters`, `train_samples` and `num_epochs`, or samples that make no
            iteration.
        """
        samples, batch = self.train_samples, self.global_batch_size
        if self.num_epochs is not None:
            epochs = self.num_epochs
            assert 0 < epochs < math.inf, f"num_epochs={epochs} must be positive"
            for name in ("train_samples", "rampup_batch_size"):
                assert getattr(self, name) is None, f"num_epochs={epochs} and {name} do not go together: use one"
            assert batch is not None, "num_epochs needs global_batch_size: the samples of one iteration"
            return
        if samples is None:
            assert self.train_iters is not None, "train_iters, train_samples or num_epochs is needed: how long to train"
            return
        assert samples > 0, f"train_samples={samples} must be positive"
        assert self.rampup_batch_size is None, "train_samples and rampup_batch_size do not go together: use train_iters"
        assert batch is not None, "train_samples needs global_batch_size: the samples of one iteration"
        assert batch > 0, f"global_batch_size={batch} must be positive"
        assert samples >= batch, f"train_samples={samples} is less than one batch: global_batch_size={batch}"
        iters = samples // batch
        assert self.train_iters in (None, self._derived_train_iters, iters), (
            f"train_iters={self.train_iters} and train_samples={samples} are both given, and the samples make {iters} "
            f"iterations of global_batch_size={batch}: use one"
        )
        if iters != self._derived_train_iters and os.getenv("RANK", "0") == "0":
            logger.info("train_iters is %d: %d samples // %s", iters, samples, batch)
        self.train_iters = self._derived_train_iters = iters

    def resolve_epochs(self, samples: int) -> None:
        """Derive `train_iters` of `num_epochs` passes over that many samples; a partial last batch counts.

        AssertionError: `train_iters` is given as well, and differs.
        """
        assert self.num_epochs is not None
        assert self.global_batch_size
        iters = math.ceil(self.num_epochs * -(-samples // self.global_batch_size))
        assert self.train_iters in (None, self._derived_train_iters, iters), (
            f"train_iters={self.train_iters} and num_epochs={self.num_epochs} are both given, and the {samples} samples"
            f" of the dataset make {iters} iterations of global_batch_size={self.global_batch_size}: use one"
        )
        self.train_iters = self._derived_train_iters = iters


@dataclass(kw_only=True)
class ValidationConfig:
    """When and how long the model is evaluated."""

    eval_iters: int | None = 100
    eval_interval: int | None = None
    start_eval_at_iter: int | None = None  # no evaluation during training before this iteration
    eval_global_batch_size: int | None = None  # None: that of training
    eval_micro_batch_size: int | None = None  # None: that of training
    skip_train: bool = False
    test_mode: bool = False
    full_validation: bool = False  # go through the whole validation set
    multiple_validation_sets: bool = False
    validation_set_names: list[str] | None = None
