"""The laws of learning rate and weight decay."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning-rate and weight-decay law, in iterations or in samples; `*_steps` are computed, in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None  # length of the final anneal
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None  # of the decay steps
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    lr_decay_steps: int | None = field(init=False, default=None)
    lr_warmup_steps: int | None = field(init=False, default=None)
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    no_weight_decay_cond_type: Literal["qwen3_next"] | None = None
    wd_incr_steps: int | None = field(init=False, default=None)
    wsd_decay_steps: int | None = field(init=False, default=None)

    def finalize(self) -> None:
        """Check that the law is given in one unit and in one way.

        Raises:
            AssertionError: a rule is broken; the message names the fields and their values.
        """
        self._check_weight_decay()
        assert not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler), (
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: "
            "the law comes from here or from the checkpoint"
        )
        self._check_units()

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if start is None:
            return
        assert start >= 0.0, f"start_weight_decay={start} is negative"
        assert end is not None, f"start_weight_decay={start} needs end_weight_decay"
        assert end >= start, f"end_weight_decay={end} must be at least start_weight_decay={start}"

    def _check_units(self) -> None:
        iters = {
            "lr_decay_iters": self.lr_decay_iters,
            "lr_warmup_iters": self.lr_warmup_iters or None,
            "lr_wsd_decay_iters": self.lr_wsd_decay_iters,
        }
        samples = {
            "lr_decay_samples": self.lr_decay_samples,
            "lr_warmup_samples": self.lr_warmup_samples or None,
            "lr_wsd_decay_samples": self.lr_wsd_decay_samples,
        }
        in_iters, in_samples = _given(iters), _given(samples)
        assert not (in_iters and in_samples), f"iterations ({in_iters}) and samples ({in_samples}) are mixed: use one"
        if self.lr_warmup_fraction is not None:
            warmup = _given({name: value for name, value in (iters | samples).items() if "warmup" in name})
            assert not warmup, f"lr_warmup_fraction={self.lr_warmup_fraction} and {warmup} are both given: use one"


def _given(values: dict[str, int | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
