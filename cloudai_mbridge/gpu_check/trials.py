"""Features tried on the proxy: number formats, and features that the loop rejects so far."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.proxy import PROXY, RECIPE, SAME_LOSS, SIZES, proxy_losses, with_share
from cloudai_mbridge.gpu_check.sweep import Trained, Training, largest_difference, losses, speed, train

CONFIG = "training.json"
CAPTURED_MARK = "CUDA graphs captured:"  # of `training.loop.graphs`
# Relative, against bf16: of the first loss, which the weights decide, and of the mean decrease of the others from it,
# which the optimizer decides. Ten losses of a model that has just begun to learn are close in any case.
FP8_FIRST_LOSS_TOLERANCE = 5e-3
FP8_DECREASE_TOLERANCE = 0.1
GRAPH_TOLERANCE = 1e-2  # relative, of the loss at any of ten steps
WARMUP_STEPS = 5  # graphs are captured in the fourth step at the latest


def fp8_current(kit: Kit) -> Figures:
    """Train the proxy in FP8 with current scaling, and with FP8 weights."""
    return _fp8(kit, "fp8_current", "fp8_cs")


def fp8_delayed(kit: Kit) -> Figures:
    """Train the proxy in FP8 with delayed scaling, and with FP8 weights."""
    return _fp8(kit, "fp8_delayed", "fp8_ds")


def fp8_blockwise(kit: Kit) -> Figures:
    """Train the proxy in FP8 with scales of blocks; its weights stay in bf16."""
    return _fp8(kit, "fp8_blockwise", "fp8_sc")


def _fp8(kit: Kit, name: str, dtype: str) -> Figures:
    """Train the proxy in a format, and compare it with bf16: losses, step time, memory."""
    from cloudai_mbridge.recipes.container import mixed_precision

    proxy_losses(kit)  # there is one
    trained: Trained = kit.shared[PROXY]
    data = json.loads((trained.directory(PROXY) / CONFIG).read_text(encoding="utf-8"))
    data["mixed_precision"] = mixed_precision(dtype)
    data["optimizer"]["use_precision_aware_optimizer"] = False  # as upstream's launcher
    config = kit.work / f"{name}.json"
    config.write_text(json.dumps(data), encoding="utf-8")
    figures, ours, expected = _try(kit, name, [], [], config)
    of_bf16 = speed(trained.good(PROXY))
    figures |= {f"{key}_of_bf16": of_bf16[key] for key in ("step_time_s", "peak_memory_gib")}
    if figures["largest_relative_difference"] == 0:
        raise PartFailed("the losses are those of bf16 to the last digit: FP8 was not used", figures)
    first = largest_difference(ours[:1], expected[:1])
    decrease, expected_decrease = mean_decrease(ours), mean_decrease(expected)
    figures |= {
        "first_loss_difference": first,
        "first_loss_tolerance": FP8_FIRST_LOSS_TOLERANCE,
        "mean_decrease": decrease,
        "mean_decrease_of_bf16": expected_decrease,
        "mean_decrease_tolerance": FP8_DECREASE_TOLERANCE,
    }
    if first > FP8_FIRST_LOSS_TOLERANCE:
        why = f"the first loss differs from part {PROXY} by {first:.2g}; at most {FP8_FIRST_LOSS_TOLERANCE:g}"
        raise PartFailed(why, figures)
    if expected_decrease <= 0:
        raise PartFailed(f"the losses of part {PROXY} do not fall: nothing can be learned from them", figures)
    if abs(decrease / expected_decrease - 1) > FP8_DECREASE_TOLERANCE:
        why = f"the losses fall by {decrease:.3g} in the mean, those of part {PROXY} by {expected_decrease:.3g}"
        raise PartFailed(f"{why}; at most {FP8_DECREASE_TOLERANCE:.0%} of difference is expected", figures)
    return figures


def mean_decrease(curve: Sequence[float]) -> float:
    """Return a curve's mean decrease from its first loss."""
    return curve[0] - statistics.fmean(curve[1:])


def graphs_local(kit: Kit) -> Figures:
    """Train the proxy with Megatron-Core's CUDA graphs of each layer."""
    return _graphs(kit, "graphs_local", "local", "")


def graphs_engine(kit: Kit) -> Figures:
    """Train the proxy with Transformer Engine's CUDA graphs of each attention."""
    return _graphs(kit, "graphs_engine", "transformer_engine", "attn")


def graphs_iteration(kit: Kit) -> Figures:
    """Train the proxy with one CUDA graph of forward and backward pass."""
    return _graphs(kit, "graphs_iteration", "local", "full_iteration")


def _graphs(kit: Kit, name: str, implementation: str, scope: str) -> Figures:
    """Train the proxy with CUDA graphs, and compare it with the run without: losses, step time, memory."""
    overrides = [f"model.cuda_graph_impl={implementation}", *([f"model.cuda_graph_scope={scope}"] if scope else [])]
    figures, *_ = _try(kit, name, [], overrides)
    plain = speed(kit.shared[PROXY].good(PROXY))
    figures |= {f"{key}_without": plain[key] for key in ("step_time_s", "peak_memory_gib")}
    difference = figures["largest_relative_difference"]
    figures["tolerance"] = GRAPH_TOLERANCE
    if difference > GRAPH_TOLERANCE:
        raise PartFailed(f"losses differ from part {PROXY} by {difference:.2g}; at most {GRAPH_TOLERANCE:g}", figures)
    if not figures["captured"]:
        raise PartFailed("no graph was captured", figures)
    return figures


def op_fuser(kit: Kit) -> Figures:
    """Train the proxy with the fused operations of Transformer Engine in its dense layers."""
    figures, *_ = _try(kit, "op_fuser", [], ["model.use_transformer_engine_op_fuser=true"])
    if (difference := figures["largest_relative_difference"]) > SAME_LOSS:
        raise PartFailed(f"losses differ from part {PROXY} by {difference:.2g}; at most {SAME_LOSS:g}", figures)
    return figures


def megatron_fsdp(kit: Kit) -> Figures:
    """Train the proxy with its parameters in the buffers of Megatron-FSDP, from the meta device."""
    fields = ("use_megatron_fsdp=true", "data_parallel_sharding_strategy=optim_grads_params")
    overrides = [*(f"ddp.{field}" for field in fields), "model.init_model_with_meta_device=true"]
    return _same_losses(kit, "megatron_fsdp", overrides)


def optimizer_offload(kit: Kit) -> Figures:
    """Train the proxy with half of its optimizer state, and the steps of that half, on the host."""
    fields = ("optimizer_cpu_offload=true", "optimizer_offload_fraction=0.5", "use_precision_aware_optimizer=true")
    return _same_losses(kit, "optimizer_offload", [f"optimizer.{field}" for field in fields])


def activation_offload(kit: Kit) -> Figures:
    """Train the proxy with the activations of two layers on the host."""
    fields = ("cpu_offloading=true", "cpu_offloading_weights=false", "cpu_offloading_num_layers=2")
    return _same_losses(kit, "activation_offload", [f"model.{field}" for field in fields])


def muon(kit: Kit) -> Figures:
    """Train the proxy with distributed Muon: the losses begin like Adam's, and fall."""
    expected = proxy_losses(kit)
    point = train(kit, "muon", [Training("muon", RECIPE, {**SIZES, "optimizer_type": "muon"})]).good("muon")
    ours = losses(point)
    figures = with_share(kit, speed(point))
    of_adam = speed(kit.shared[PROXY].good(PROXY))
    figures |= {f"{key}_of_adam": of_adam[key] for key in ("step_time_s", "peak_memory_gib")}
    figures |= {"mean_decrease": mean_decrease(ours), "mean_decrease_of_adam": mean_decrease(expected)}
    if (difference := largest_difference(ours[:1], expected[:1])) > SAME_LOSS:
        raise PartFailed(
            f"the first loss differs from part {PROXY} by {difference:.2g}; at most {SAME_LOSS:g}", figures
        )
    if figures["mean_decrease"] <= 0:
        raise PartFailed("the losses do not fall", figures)
    return figures


def _same_losses(kit: Kit, name: str, overrides: Sequence[str]) -> Figures:
    figures, *_ = _try(kit, name, [], overrides)
    plain = speed(kit.shared[PROXY].good(PROXY))
    figures |= {f"{key}_without": plain[key] for key in ("step_time_s", "peak_memory_gib")}
    if (difference := figures["largest_relative_difference"]) > SAME_LOSS:
        raise PartFailed(f"losses differ from part {PROXY} by {difference:.2g}; at most {SAME_LOSS:g}", figures)
    return figures


def _try(
    kit: Kit, name: str, lift: Sequence[str], overrides: Sequence[str], config: Path | None = None
) -> tuple[Figures, list[float], list[float]]:
    """Train the proxy with overrides, or as `config`; return its figures, its losses and the plain proxy's losses."""
    expected = proxy_losses(kit)
    trained: Trained = kit.shared[PROXY]
    config = config or trained.directory(PROXY) / CONFIG
    figures = with_share(kit, run_trial(kit, name, config, lift, overrides))
    ours: list[float] = figures.pop("losses")
    figures |= {"largest_relative_difference": largest_difference(ours, expected), "lifted": list(lift)}
    return figures, ours, expected


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
        "losses": [math.nan if step.loss is None else step.loss for step in steps],
        "step_time_s": statistics.median(step.step_time_s or 0.0 for step in counted),
        "tflops_per_gpu": statistics.median(step.tflops_per_gpu or 0.0 for step in counted),
        "peak_memory_gib": max((step.peak_memory_gib or 0.0) for step in steps),
        "captured": CAPTURED_MARK in log.read_text(encoding="utf-8", errors="replace"),
    }
