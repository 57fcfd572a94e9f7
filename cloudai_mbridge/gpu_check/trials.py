"""Features that the loop refuses so far, tried on the proxy: what is found says whether the refusal can go."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.proxy import PROXY, proxy_losses, with_share
from cloudai_mbridge.gpu_check.sweep import Trained, largest_difference
from cloudai_mbridge.gpu_check.workers.trial import GRAPHS_MARK

CONFIG = "training.json"
# Relative, of the loss at any of ten steps, against bf16
FP8_TOLERANCE = 5e-2
GRAPH_TOLERANCE = 1e-2
WARMUP_STEPS = 5  # graphs are captured in the fourth


def fp8(kit: Kit) -> Figures:
    """Train the proxy in FP8 with current scaling."""
    overrides = ["mixed_precision=bf16_with_fp8_current_scaling_mixed"]
    figures = _try(kit, "fp8", ["model.fp8"], overrides, FP8_TOLERANCE)
    if figures["largest_relative_difference"] == 0:
        raise PartFailed("the losses are those of bf16 to the last digit: FP8 was not used", figures)
    return figures


def cuda_graphs(kit: Kit) -> Figures:
    """Train the proxy with Megatron-Core's CUDA graphs of each layer."""
    figures = _try(kit, "cuda_graphs", ["model.cuda_graph_impl"], ["model.cuda_graph_impl=local"], GRAPH_TOLERANCE)
    if not figures["graphs_created"]:
        raise PartFailed("Megatron-Core has captured no graph", figures)
    return figures


def _try(kit: Kit, name: str, lift: Sequence[str], overrides: Sequence[str], tolerance: float) -> Figures:
    expected = proxy_losses(kit)
    trained: Trained = kit.shared[PROXY]
    figures = with_share(kit, run_trial(kit, name, trained.directory(PROXY) / CONFIG, lift, overrides))
    difference = largest_difference(figures.pop("losses"), expected)
    figures |= {"largest_relative_difference": difference, "tolerance": tolerance, "lifted": list(lift)}
    if difference > tolerance:
        raise PartFailed(f"losses differ from part {PROXY} by {difference:.2g}; at most {tolerance:g}", figures)
    return figures


def run_trial(kit: Kit, name: str, config: Path, lift: Sequence[str], overrides: Sequence[str]) -> Figures:
    """Train in a process of its own; return its losses, step time, TFLOP/s and memory."""
    from cloudai_mbridge.logs import read_log

    options = [word for field in lift for word in ("--lift", field)]
    here = f"logger.save_config_filepath={kit.work / name}.yaml"
    argv = [sys.executable, "-m", "cloudai_mbridge.gpu_check.workers.trial", *options, str(config)]
    kit.run([*argv, *overrides, here], log=name)
    log = kit.work / f"{name}.stdout"
    steps = read_log(log).steps
    counted = steps[WARMUP_STEPS:]
    if not counted:
        raise PartFailed(f"{name}: {len(steps)} steps are in the log")
    return {
        "losses": [step.loss for step in steps],
        "step_time_s": statistics.median(step.step_time_s or 0.0 for step in counted),
        "tflops_per_gpu": statistics.median(step.tflops_per_gpu or 0.0 for step in counted),
        "peak_memory_gib": max((step.peak_memory_gib or 0.0) for step in steps),
        "graphs_created": f"{GRAPHS_MARK} true" in log.read_text(encoding="utf-8", errors="replace"),
    }
