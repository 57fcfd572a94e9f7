"""Detectors of slow ranks: Megatron-Core's and NVIDIA Resiliency Extension's.

Megatron-Core's (megatron/core/README_STRAGGLER.md), with its defects fixed, times every rank's forward pass with GPU
events. Without a GPU it stays off; `report` is still a collective, and prints that. The other finds GPUs that compute
more slowly than the others, or than before.
"""

import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import StragglerDetector

from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.resilience.packages import nvrx

logger = logging.getLogger(__name__)


class GuardedStragglerDetector(StragglerDetector):  # type: ignore[misc]
    """Straggler detector that allows ranks without measurements; accessing the singleton does not reset it."""

    def __init__(self) -> None:
        if not hasattr(self, "_off"):
            super().__init__()

    def elapsed(self) -> tuple[float, float, float, float, float, float]:
        """Return (forward ms, batch ms, temperature, power, utilisation, clock) since the last call, and reset.

        Starts without a stop count as nothing measured. Readings are NaN if their library (pynvml) is missing.
        """
        if self._off:
            return 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        forward_ms = batch_ms = 0.0
        gemm = (self.start_gemm_ev, self.stop_gemm_ev, self.start_gemm_tm, self.stop_gemm_tm)
        data = (self.start_data_ev, self.stop_data_ev, self.start_data_tm, self.stop_data_tm)
        if len({len(each) for each in gemm}) > 1 or len({len(each) for each in data}) > 1 or 0 in gemm[3] + data[3]:
            write_line(f"straggler detector: starts and stops of rank {self.rank} do not match; interval left out")
        else:
            torch.cuda.synchronize()
            forward_ms, batch_ms = sum(_spans_ms(*gemm)), max(_spans_ms(*data), default=0.0)
        gpu: Any = torch.cuda
        try:
            readings = gpu.temperature(), gpu.power_draw(), gpu.utilization(), gpu.clock_rate()  # C, mW, %, MHz
        except (ImportError, RuntimeError):  # no pynvml, or not reported by the driver
            readings = (math.nan,) * 4
        self.reset()
        temperature, power, utilisation, clock = map(float, readings)
        return forward_ms, batch_ms, temperature, power, utilisation, clock

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Print the slowest and fastest ranks on rank 0. Every rank must call it, also when the detector is off.

        total_flops: model FLOPs of all ranks in the interval. log_interval: its iterations. Returns whether this rank
        printed.
        """
        has_printed = False
        if not self._off and total_flops > 0.0 and log_interval > 0:
            forward_ms, *rest = self.elapsed()
            step_ms = forward_ms / log_interval
            flops = total_flops / log_interval
            # FLOP/ms/1e9 = TFLOP/s; a rank without measurements counts as idle
            tflops = flops / (step_ms * 1e9 * self.world) / self.amp if step_ms > 0 else 0.0
            found = self._min_max(step_ms, *rest, tflops)
            if self.rank == 0 and found is not None:
                for line in _report_lines(found, self.mmcnt, self.world):
                    write_line(line)
                has_printed = True
        self._check_toggle()
        return has_printed


def straggler_timer() -> GuardedStragglerDetector:
    """Return the singleton, made ours: `StragglerDetector()` gives the same object from now on."""
    if not isinstance(getattr(StragglerDetector, "_instance", None), GuardedStragglerDetector):
        StragglerDetector._instance = object.__new__(GuardedStragglerDetector)
    return GuardedStragglerDetector()


def configure_straggler(state: Any) -> None:
    """Turn the state's detector on, if configured and on a GPU. The process group must be up."""
    config = state.cfg.straggler
    if config is None or not config.log_straggler:
        return
    if not torch.cuda.is_available() and dist.get_rank() == 0:
        write_line("straggler detector: it needs a GPU; this run has none, the detector stays off")
    state.straggler_timer.configure(
        dist.get_world_size(),
        dist.get_rank(),
        mmcnt=config.straggler_minmax_count,
        port=config.straggler_ctrlr_port,
        enabled=config.enable_straggler_on_startup and not config.disable_straggler_on_startup,
    )


def _spans_ms(starts: list[Any], stops: list[Any], start_ns: list[int], stop_ns: list[int]) -> list[float]:
    """Return each section's time: the GPU's or the host's, whichever is longer."""
    on_gpu = [start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]
    on_host = [(stop - start) / 1e6 for start, stop in zip(start_ns, stop_ns, strict=True)]
    return [max(pair) for pair in zip(on_gpu, on_host, strict=True)]


def _report_lines(found: Any, num_named: int, world_size: int) -> list[str]:
    """Render the result of `_min_max`; the names are Megatron's."""
    fields = {"Rtt": "elapsed", "Pwr": "power", "Tmp": "temp", "Utl": "util", "Clk": "clock", "DRtt": "btime"}
    slowest, fastest = found.aflops[0]()[:2], found.aflops[-1]()[:2]
    parts = [
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}]",
        *(
            f"{end}{name}/Rnk: {getattr(found, f'{prefix}_{field}')}"
            for name, field in fields.items()
            for end, prefix in (("Mn", "min"), ("Mx", "max"))
        ),
        f"MnEtpt/Rnk: {slowest[0]:.2f}TF/{slowest[1]}",
        f"MxEtpt/Rnk: {fastest[0]:.2f}TF/{fastest[1]}",
    ]
    lines = [" | ".join(parts)]
    if 1 < num_named < world_size:
        for end, extreme, ranks in (
            ("Bottom", "lowest ", found.aflops[:num_named]),
            ("Top   ", "highest", found.aflops[-num_named:]),
        ):
            named = "".join(f" {rank}," for rank in ranks)
            lines.append(f"^^^^ {end} {len(ranks)} Ranks with {extreme} Etpt(TF):{named}")
    return lines


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

        @functools.wraps(train_step_func)
        def measured(*args: Any, **kwargs: Any) -> Any:
            return measured.run(*args, **kwargs)  # type: ignore[attr-defined]

        # the detector replaces `run`, and restores it at its shutdown; it keeps the owner, hashable, as a key
        measured.run = train_step_func  # type: ignore[attr-defined]
        try:
            self._straggler.Detector.wrap_callables([self._straggler.CallableId(measured, "run")])
        except Exception as error:
            self.logger.warning("The training step is not measured: %s", error)
            return train_step_func
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
            config = self.config
            slow = report.identify_stragglers(
                gpu_rel_threshold=config.gpu_relative_perf_threshold,
                gpu_indiv_threshold=config.gpu_individual_perf_threshold,
            )
            stragglers = slow["straggler_gpus_relative"] | slow["straggler_gpus_individual"]
            for each in sorted(stragglers, key=lambda each: int(each.rank)):
                write_line(f"STRAGGLER DETECTED: Rank={each.rank} Node={each.node}")
            found = bool(stragglers)
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
        ranks = sorted(known, key=lambda rank: (known[rank], rank))
        if (count := self.config.num_gpu_perf_scores_to_print) > 0:
            parts = {f" of all {len(ranks)} ranks": ranks}
            if len(ranks) > 2 * count:
                parts = {f", worst {count} of {len(ranks)} ranks": ranks[:count]}
                parts |= {f", best {count} of {len(ranks)} ranks": ranks[-count:][::-1]}
            for which, some in parts.items():
                write_line(f"GPU {name} performance{which}:")
                for rank in some:
                    write_line(f"  Rank={rank} Node={nodes[rank]} Score={known[rank]:.2f}")
        if self.config.enable_logging:
            values, text = known.values(), "GPU %s performance: min %.4f, median %.4f, max %.4f"
            self.logger.info(text, name, min(values), statistics.median(values), max(values))


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
