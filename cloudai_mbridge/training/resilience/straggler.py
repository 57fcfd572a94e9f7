"""Megatron-Core's straggler detector (megatron/core/README_STRAGGLER.md), with its defects fixed: it times every rank's
forward pass with GPU events. Without a GPU it stays off; `report` is still a collective, and prints that."""

import math
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import StragglerDetector

from cloudai_mbridge.training.process.log_lines import write_line


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
        forward_ms, batch_ms = self._times_ms()
        readings = _readings()
        self.reset()
        return forward_ms, batch_ms, *readings

    def _times_ms(self) -> tuple[float, float]:
        gemm = (self.start_gemm_ev, self.stop_gemm_ev, self.start_gemm_tm, self.stop_gemm_tm)
        data = (self.start_data_ev, self.stop_data_ev, self.start_data_tm, self.stop_data_tm)
        if len({len(each) for each in gemm}) > 1 or len({len(each) for each in data}) > 1 or 0 in gemm[3] + data[3]:
            write_line(f"straggler detector: starts and stops of rank {self.rank} do not match; interval left out")
            return 0.0, 0.0
        torch.cuda.synchronize()
        return sum(_spans_ms(*gemm)), max(_spans_ms(*data), default=0.0)

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


def _readings() -> tuple[float, float, float, float]:
    """Read this GPU's temperature (C), power (mW), utilisation (%) and clock (MHz)."""
    gpu = torch.cuda
    try:
        return float(gpu.temperature()), float(gpu.power_draw()), float(gpu.utilization()), float(gpu.clock_rate())
    except (ImportError, RuntimeError):  # no pynvml, or not reported by the driver
        return math.nan, math.nan, math.nan, math.nan


def _report_lines(found: Any, num_named: int, world_size: int) -> list[str]:
    """Render the result of `_min_max`; the names are Megatron's."""
    slowest, fastest = found.aflops[0]()[:2], found.aflops[-1]()[:2]
    parts = [
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}]",
        *(
            f"{end}{name}/Rnk: {getattr(found, f'{prefix}_{field}')}"
            for name, field in _FIELDS.items()
            for end, prefix in (("Mn", "min"), ("Mx", "max"))
        ),
        f"MnEtpt/Rnk: {slowest[0]:.2f}TF/{slowest[1]}",
        f"MxEtpt/Rnk: {fastest[0]:.2f}TF/{fastest[1]}",
    ]
    lines = [" | ".join(parts)]
    if 1 < num_named < world_size:
        lines.append(_ranking("Bottom", "lowest ", found.aflops[:num_named]))
        lines.append(_ranking("Top   ", "highest", found.aflops[-num_named:]))
    return lines


def _ranking(end: str, extreme: str, ranks: list[Any]) -> str:
    return f"^^^^ {end} {len(ranks)} Ranks with {extreme} Etpt(TF):" + "".join(f" {rank}," for rank in ranks)


_FIELDS = {"Rtt": "elapsed", "Pwr": "power", "Tmp": "temp", "Utl": "util", "Clk": "clock", "DRtt": "btime"}
