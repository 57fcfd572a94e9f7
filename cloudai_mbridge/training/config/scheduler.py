"""The laws of learning rate and weight decay."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning-rate and weight-decay law, in iterations or in samples; `*_steps` are computed, in samples."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    max_steps: int | None = None  # iterations that the laws of learning rate and weight decay are made for
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
        """Check that the law is given in one unit and one way; an AssertionError names the fields and their values."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if start is not None:
            assert start >= 0.0, f"start_weight_decay={start} is negative"
            assert end is not None, f"start_weight_decay={start} needs end_weight_decay"
            assert end >= start, f"end_weight_decay={end} must be at least start_weight_decay={start}"
        assert not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler), (
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: "
            "the law comes from here or from the checkpoint"
        )
        iters = self._given("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
        samples = self._given("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
        assert not (iters and samples), f"iterations ({iters}) and samples ({samples}) are mixed: use one"
        warmup = self._given("lr_warmup_iters", "lr_warmup_samples")
        assert self.lr_warmup_fraction is None or not warmup, (
            f"lr_warmup_fraction={self.lr_warmup_fraction} and {warmup} are both given: use one"
        )

    def _given(self, *names: str) -> str:
        """Return the fields that differ from their defaults, with their values."""
        values = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in values.items() if value not in (None, getattr(SchedulerConfig, name))}
        return ", ".join(f"{name}={value}" for name, value in given.items())
