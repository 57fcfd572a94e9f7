"""Megatron-Core's timers on a monotonic clock (theirs is the wall clock, which can be set while a step runs)."""

import time

import torch.distributed as dist
from megatron.core.timers import Timer, Timers

from cloudai_mbridge.training.process.device import synchronize
from cloudai_mbridge.training.process.log_lines import write_line

STEP_TIMER = "interval-time"  # always on: a benchmark needs step times


class MonotonicTimer(Timer):  # type: ignore[misc]
    """A timer that drains this rank's device before and after the interval; times are in seconds."""

    def start(self, barrier: bool = False) -> None:
        """Start. barrier: wait for all ranks first; a collective then."""
        assert not self._started, f"timer {self.name} runs already"
        _wait(barrier)
        self._start_time = time.perf_counter()
        self._started: bool = True

    def stop(self, barrier: bool = False) -> None:
        """Stop. barrier: wait for all ranks first, so that the slowest one's time is taken; a collective then."""
        assert self._started, f"timer {self.name} does not run"
        _wait(barrier)
        elapsed = time.perf_counter() - self._start_time
        self._elapsed += elapsed
        self._active_time += elapsed
        self._started = False


def _wait(barrier: bool) -> None:
    synchronize()
    if barrier and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


class MonotonicTimers(Timers):  # type: ignore[misc]
    """A group of such timers; one whose level is above the configured level measures nothing."""

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of this name, and make it at its first use."""
        level = self._max_log_level if log_level is None else log_level
        if name not in self._timers and (level <= self._log_level or name == STEP_TIMER):
            self._timers[name] = MonotonicTimer(name)
            self._log_levels[name] = level
        return super().__call__(name, log_level)

    def log(
        self,
        names: list[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times of the timers (ms), the last rank by default, divided by `normalizer`. A collective."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is not None and dist.get_rank() == (dist.get_world_size() - 1 if rank is None else rank):
            write_line(text)


_LEVEL_1 = [
    "forward-backward",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "all-grads-sync",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "optimizer",
]
_LEVEL_2 = [
    "batch-generator",
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
]


def timers_to_log(level: int) -> list[str]:
    """Return the names at `logger.timing_log_level`."""
    return [*(_LEVEL_1 if level >= 1 else ()), *(_LEVEL_2 if level >= 2 else ())]
