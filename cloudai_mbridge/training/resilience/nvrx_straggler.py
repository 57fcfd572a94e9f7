"""NVIDIA Resiliency Extension's straggler detection: GPUs that compute more slowly than the others, or than before."""

import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.resilience.packages import nvrx

logger = logging.getLogger(__name__)


class _Step:
    """Holder of the wrapped function: the detector replaces `run`, and restores it at its shutdown."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


class NVRxStragglerDetectionManager:
    """The detector of one process; every rank makes the same calls. Raises ImportError: the package is missing."""

    def __init__(self, config: NVRxStragglerDetectionConfig) -> None:
        self._straggler = nvrx("straggler")
        self.config = config
        wanted = {"relative": config.calc_relative_gpu_perf, "individual": config.calc_individual_gpu_perf}
        self._scores = [name for name, is_wanted in wanted.items() if is_wanted]
        self.logger = logging.getLogger(config.logger_name)
        self.initialized = False

    def initialize(self) -> None:
        """Start the detector, unless it is not enabled. Raises RuntimeError: it is running already."""
        if self.initialized:
            raise RuntimeError("NVRxStragglerDetectionManager is already initialized")
        if not self.config.enabled:
            return
        self._straggler.Detector.initialize(
            scores_to_compute=[f"{name}_perf_scores" for name in self._scores],
            gather_on_rank0=True,
            profiling_interval=self.config.profiling_interval,
            report_time_interval=self.config.report_time_interval,
        )
        self.initialized = True

    def wrap_train_step_function(self, train_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step, measured; or as it came, when the detector does not run or cannot wrap it."""
        if not self.initialized:
            return train_step_func
        step = _Step(train_step_func)
        try:
            self._straggler.Detector.wrap_callables([self._straggler.CallableId(step, "run")])
        except Exception as error:
            self.logger.warning("The training step is not measured: %s", error)
            return train_step_func

        @functools.wraps(train_step_func)
        def measured(*args: Any, **kwargs: Any) -> Any:
            return step.run(*args, **kwargs)

        return measured

    def check_stragglers(self, rank: int) -> bool:
        """Report when the interval has elapsed; return, with `stop_if_detected`, whether there is a straggler.

        Every rank must call it after every step, and gets the answer of rank 0.
        """
        if not self.initialized:
            return False
        report = self._straggler.Detector.generate_report_if_interval_elapsed()
        found = False
        if report is not None and rank == 0:
            for name in self._scores:
                self._show(name, getattr(report, f"gpu_{name}_perf_scores"), report.rank_to_node)
            found = self._has_stragglers(report)
        if not self.config.stop_if_detected:
            return False
        # the interval need not end on all ranks at the same step: all poll rank 0 at every step
        flag = torch.tensor([int(found)], device=current_device())
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def shutdown(self) -> None:
        """Stop the detector; again is harmless."""
        if self.initialized:
            self.initialized = False
            self._straggler.Detector.shutdown()

    def _show(self, name: str, scores: Mapping[int, float], nodes: Mapping[int, str]) -> None:
        known = {rank: score for rank, score in scores.items() if not math.isnan(score)}
        if not known:
            self.logger.warning("GPU %s performance: no kernel was measured", name)
            return
        if self.config.num_gpu_perf_scores_to_print > 0:
            for line in _score_lines(name, known, nodes, self.config.num_gpu_perf_scores_to_print):
                write_line(line)
        if self.config.enable_logging:
            values, text = known.values(), "GPU %s performance: min %.4f, median %.4f, max %.4f"
            self.logger.info(text, name, min(values), statistics.median(values), max(values))

    def _has_stragglers(self, report: Any) -> bool:
        found = report.identify_stragglers(
            gpu_rel_threshold=self.config.gpu_relative_perf_threshold,
            gpu_indiv_threshold=self.config.gpu_individual_perf_threshold,
        )
        both = found["straggler_gpus_relative"] | found["straggler_gpus_individual"]
        for straggler in sorted(both, key=lambda each: int(each.rank)):
            write_line(f"STRAGGLER DETECTED: Rank={straggler.rank} Node={straggler.node}")
        return bool(both)


def _score_lines(name: str, scores: Mapping[int, float], nodes: Mapping[int, str], count: int) -> list[str]:
    """Return the `count` worst and best ranks, or all ranks if not more than both."""
    ranks = sorted(scores, key=lambda rank: (scores[rank], rank))

    def lines(which: list[int]) -> list[str]:
        return [f"  Rank={rank} Node={nodes[rank]} Score={scores[rank]:.2f}" for rank in which]

    if len(ranks) <= 2 * count:
        return [f"GPU {name} performance of all {len(ranks)} ranks:", *lines(ranks)]
    return [
        f"GPU {name} performance, worst {count} of {len(ranks)} ranks:",
        *lines(ranks[:count]),
        f"GPU {name} performance, best {count} of {len(ranks)} ranks:",
        *lines(ranks[-count:][::-1]),
    ]


def check_nvrx_straggler_detection(manager: NVRxStragglerDetectionManager | None) -> bool:
    """Return whether to stop over a straggler; False without a manager. Every rank calls it after every step."""
    return manager is not None and manager.check_stragglers(dist.get_rank())


def safe_shutdown_nvrx_straggler_manager(manager: NVRxStragglerDetectionManager | None) -> None:
    """Stop the detector; a failure to do so is logged and ends nothing."""
    if manager is None:
        return
    try:
        manager.shutdown()
    except Exception as error:
        logger.warning("The straggler detection did not shut down: %s", error)
