"""An 8B-shaped model with few layers: its speed against a measured matmul peak, its features against the plain run, and
the predictions of `mbridge estimate` against its memory and step time."""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions
from cloudai_mbridge.gpu_check.kit import (
    Figures,
    Kit,
    PartFailed,
    PartSkipped,
    Trained,
    hide_transformer_engine,
    largest_difference,
    losses,
    speed,
    train,
    training,
)

RECIPE = "llama3_8b"
# 4 of 32 layers: 1.9 B parameters, 35 GB of weights, gradients and optimizer; with activations it fits 80 GB
SIZES = {"num_layers": 4, "seq_length": 4096, "mb": 1, "gb": 4, "compute_dtype": "bf16"}
MATMUL = "matmul"
PROXY = "proxy"
SAME_LOSS = 1e-2  # relative, of the loss at any step, for the same weights and data in bf16
CONFIG = "training.json"

EXPERTS = "qwen3_30b_a3b"
# 2 of 48 layers: 1.9 B parameters. The router is forced to balance: no expert gets twice its share of 256 tokens
EXPERT_SIZES = {"num_layers": 2, "seq_length": 4096, "mb": 1, "gb": 4, "compute_dtype": "bf16", "ep": 1}
ROOM = {"model.moe_expert_capacity_factor": 2.0, "model.moe_pad_expert_input_to_capacity": True}

# Part -> number format
FP8 = {"fp8_current": "fp8_cs", "fp8_delayed": "fp8_ds", "fp8_blockwise": "fp8_sc"}
# Relative, against bf16: of the first loss, which the weights decide, and of the mean decrease of the others from it,
# which the optimizer decides. Ten losses of a model that has just begun to learn are close in any case.
FP8_FIRST_LOSS_TOLERANCE = 5e-3
FP8_DECREASE_TOLERANCE = 0.1
# Part -> overrides of the proxy's configuration
FEATURES = {
    "graphs_local": ["model.cuda_graph_impl=local"],
    "graphs_engine": ["model.cuda_graph_impl=transformer_engine", "model.cuda_graph_scope=attn"],
    "graphs_iteration": ["model.cuda_graph_impl=local", "model.cuda_graph_scope=full_iteration"],
    "op_fuser": ["model.use_transformer_engine_op_fuser=true"],
    "megatron_fsdp": [
        *("ddp.use_megatron_fsdp=true", "ddp.data_parallel_sharding_strategy=optim_grads_params"),
        "model.init_model_with_meta_device=true",
    ],
    "optimizer_offload": [
        *("optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.5"),
        "optimizer.use_precision_aware_optimizer=true",
    ],
    "activation_offload": [
        *("model.cpu_offloading=true", "model.cpu_offloading_weights=false", "model.cpu_offloading_num_layers=2")
    ],
}
CAPTURED_MARK = "CUDA graphs captured:"  # of `training.loop.graphs`
WARMUP_STEPS = 5  # graphs are captured in the fourth step at the latest

PREDICTIONS = "predictions"
_MEASURES = ("peak_memory_gib", "step_time_s")
_BASE: dict[str, Any] = {"num_layers": 2, "seq_length": 2048, "mb": 1, "gb": 4, "compute_dtype": "bf16"}
# One size changes at a time, to expose a wrong term of the estimate
POINTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "layers1": {"num_layers": 1},
    "layers4": {"num_layers": 4},
    "seq1024": {"seq_length": 1024},
    "seq4096": {"seq_length": 4096},
    "mb2": {"mb": 2},
    "mb4": {"mb": 4},
    "gb8": {"gb": 8},
    "hidden2048": {"hidden_size": 2048},
    "recompute": {"recompute_num_layers": 2},
}
# Torch's allocator does not count it
_CONTEXT_GIB = Assumptions().cuda_context / GIB
_MEMORY = f"reserved by torch's allocator; predicted without the CUDA context of {_CONTEXT_GIB:g} GiB"


def matmul(kit: Kit) -> Figures:
    """Measure the peak of this GPU in a large bf16 matrix product."""
    figures = kit.worker("machine", "matmul", log="matmul")
    kit.shared[MATMUL] = figures["tflops"]
    return figures


def proxy(kit: Kit) -> Figures:
    """Train the proxy in bf16, with Transformer Engine if it can be imported."""
    trained = train(kit, PROXY, [training(PROXY, RECIPE, SIZES)])
    kit.shared[PROXY] = trained
    return with_share(kit, speed(trained.good(PROXY)))


def without_transformer_engine(kit: Kit) -> Figures:
    """Train the proxy on local layers, with Transformer Engine hidden from the process."""
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"part {PROXY} has run without it already: {kit.device.no_transformer_engine}")
    name = "without_transformer_engine"
    point = train(kit, name, [training(name, RECIPE, SIZES)], **hide_transformer_engine(kit)).good(name)
    figures = with_share(kit, speed(point))
    if figures["transformer_engine"]:
        raise PartFailed("Transformer Engine was used although it was hidden", figures)
    return _same_losses(figures, losses(point), losses(_plain(kit)))


def recomputation(kit: Kit) -> Figures:
    """Train the proxy with recomputed modules: less memory."""
    name, expected = "recomputation", losses(_plain(kit))
    point = train(kit, name, [training(name, RECIPE, {**SIZES, "recompute_modules": "core_attn,mlp"})]).good(name)
    figures = _same_losses(with_share(kit, speed(point)) | _cost_of_plain(kit, "of_proxy"), losses(point), expected)
    if figures["peak_memory_gib"] >= figures["peak_memory_gib_of_proxy"]:
        raise PartFailed("the peak of memory is not lower than without recomputation", figures)
    return figures


def muon(kit: Kit) -> Figures:
    """Train the proxy with distributed Muon: the losses begin like Adam's, and fall."""
    expected = losses(_plain(kit))
    point = train(kit, "muon", [training("muon", RECIPE, {**SIZES, "optimizer_type": "muon"})]).good("muon")
    ours = losses(point)
    figures = with_share(kit, speed(point)) | _cost_of_plain(kit, "of_adam")
    figures |= {"mean_decrease": _mean_decrease(ours), "mean_decrease_of_adam": _mean_decrease(expected)}
    if (difference := largest_difference(ours[:1], expected[:1])) > SAME_LOSS:
        why = f"the first loss differs from part {PROXY} by {difference:.2g}; at most {SAME_LOSS:g}"
        raise PartFailed(why, figures)
    if figures["mean_decrease"] <= 0:
        raise PartFailed("the losses do not fall", figures)
    return figures


def expert_capacity(kit: Kit) -> Figures:
    """Train grouped experts without a limit, and padded to a size with room for every token: the same losses."""
    tests = [training("without_limit", EXPERTS, EXPERT_SIZES), training("with_room", EXPERTS, EXPERT_SIZES, ROOM)]
    return _pair(kit, "expert_capacity", tests, ("without_limit", "with_room"), "those without a limit")


def distributed_optimizer(kit: Kit) -> Figures:
    """Train with and without the distributed optimizer: the same losses. Two ranks of a tiny model without a GPU."""
    if kit.device.gpu is None:
        recipe, args = "gpt_tiny", {"compute_dtype": "fp32", "num_gpus": 2}
    else:
        recipe, args = RECIPE, {**SIZES, "num_layers": 1}
    is_used = dict.fromkeys(("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer"), True)
    is_unused = dict.fromkeys((*is_used, "ddp.overlap_param_gather"), False)
    tests = [training("with", recipe, args, is_used), training("without", recipe, args, is_unused)]
    return _pair(kit, "distributed_optimizer", tests, ("without", "with"), "those without it")


def _pair(kit: Kit, name: str, tests: Sequence[Figures], names: tuple[str, str], of: str) -> Figures:
    """Train two tests, and compare the losses of the second with the first's."""
    trained = train(kit, name, tests)
    rows, missing = trained.each(names, lambda _, point: speed(point))
    figures: Figures = {**rows}
    if missing:
        raise PartFailed(missing, figures)
    expected, ours = (losses(trained.good(each)) for each in names)
    return _same_losses(figures, ours, expected, of)


def fp8(name: str, kit: Kit) -> Figures:
    """Train the proxy in a format, and compare it with bf16: losses, step time, memory."""
    from cloudai_mbridge.recipes.container import mixed_precision

    data = json.loads(_config_of_plain(kit).read_text(encoding="utf-8"))
    data["mixed_precision"] = mixed_precision(FP8[name])
    data["optimizer"]["use_precision_aware_optimizer"] = False  # as upstream's launcher
    config = kit.work / f"{name}.json"
    config.write_text(json.dumps(data), encoding="utf-8")
    figures, ours, expected = _try(kit, name, config, [])
    figures |= _cost_of_plain(kit, "of_bf16")
    if figures["largest_relative_difference"] == 0:
        raise PartFailed("the losses are those of bf16 to the last digit: FP8 was not used", figures)
    first = largest_difference(ours[:1], expected[:1])
    decrease, expected_decrease = _mean_decrease(ours), _mean_decrease(expected)
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


def feature(name: str, kit: Kit) -> Figures:
    """Train the proxy with a feature, and compare it with the run without: losses, step time, memory."""
    figures, ours, expected = _try(kit, name, _config_of_plain(kit), FEATURES[name])
    is_graph = name.startswith("graphs_")
    figures |= _cost_of_plain(kit, "without") | ({"tolerance": SAME_LOSS} if is_graph else {})
    figures = _same_losses(figures, ours, expected)
    if is_graph and not figures["captured"]:
        raise PartFailed("no graph was captured", figures)
    return figures


def _try(kit: Kit, name: str, config: Path, overrides: Sequence[str]) -> tuple[Figures, list[float], list[float]]:
    """Train a changed proxy; return its figures, its losses and the plain proxy's losses."""
    expected = losses(_plain(kit))
    figures = with_share(kit, run_trial(kit, name, config, overrides))
    ours: list[float] = figures.pop("losses")
    return {**figures, "largest_relative_difference": largest_difference(ours, expected)}, ours, expected


def run_trial(kit: Kit, name: str, config: Path, overrides: Sequence[str]) -> Figures:
    """Train in a process of its own; return its losses, step time, TFLOP/s and memory."""
    from cloudai_mbridge.logs import read_log
    from cloudai_mbridge.metrics import measure

    here = f"logger.save_config_filepath={kit.work / name}.yaml"
    argv = [sys.executable, "-m", "cloudai_mbridge.training", "--config", str(config), *overrides, here]
    kit.run(argv, log=name)
    log = kit.work / f"{name}.stdout"
    steps = read_log(log).steps
    metrics = measure(steps, WARMUP_STEPS, None)
    if metrics.step_time_s is None:
        raise PartFailed(f"{name}: {len(steps)} steps are in the log")
    return {
        "losses": [math.nan if step.loss is None else step.loss for step in steps],
        "step_time_s": metrics.step_time_s.capped_mean,
        "tflops_per_gpu": metrics.tflops_per_gpu.capped_mean if metrics.tflops_per_gpu else 0.0,
        "peak_memory_gib": max((step.peak_memory_gib or 0.0) for step in steps),
        "captured": CAPTURED_MARK in log.read_text(encoding="utf-8", errors="replace"),
    }


def predictions(kit: Kit) -> Figures:
    """Train the ten points; the part fails if a number of any of them could not be compared."""
    tests = [training(name, RECIPE, {**_BASE, **sizes}, steps=7) for name, sizes in POINTS.items()]
    found, missing = train(kit, PREDICTIONS, tests).each(list(POINTS), _row)
    rows = list(found.values())
    errors = {name: [abs(row[name]["error"]) for row in rows if row[name]["error"] is not None] for name in _MEASURES}
    medians = {name: statistics.median(sizes) if sizes else None for name, sizes in errors.items()}
    figures: Figures = {"memory": _MEMORY, "points": rows, "median_absolute_error": medians}
    gaps = [
        f"{row['point']}: {measure} was not {'measured' if row[measure]['predicted'] else 'predicted'}"
        for row in rows
        for measure in _MEASURES
        if row[measure]["error"] is None
    ]
    if missing or gaps:
        raise PartFailed("; ".join(filter(None, [missing, *gaps])), figures)
    return figures


def _row(name: str, point: Figures) -> Figures:
    measured, predicted = speed(point), dict(point.get("predicted") or {})
    if predicted.get("peak_memory_gib"):
        predicted["peak_memory_gib"] -= _CONTEXT_GIB
    row: Figures = {"point": name}
    for measure in _MEASURES:
        ours, theirs = predicted.get(measure), measured[measure]
        row[measure] = {"predicted": ours, "measured": theirs, "error": ours / theirs - 1 if ours and theirs else None}
    return row


def with_share(kit: Kit, figures: Figures) -> Figures:
    """Add the share of the bf16 matrix product that was measured."""
    peak, rate = kit.shared.get(MATMUL), figures.get("tflops_per_gpu")
    return {**figures, "share_of_bf16_matmul_peak": rate / peak if peak and rate else None}


def _plain(kit: Kit) -> Figures:
    """Return the point of the plain proxy. Raises PartFailed: it has not run."""
    trained = kit.shared.get(PROXY)
    if not isinstance(trained, Trained):
        raise PartFailed(f"part {PROXY} left nothing to compare with")
    return trained.good(PROXY)


def _config_of_plain(kit: Kit) -> Path:
    _plain(kit)  # there is one
    trained: Trained = kit.shared[PROXY]
    return trained.directory(PROXY) / CONFIG


def _cost_of_plain(kit: Kit, suffix: str) -> Figures:
    plain = speed(_plain(kit))
    return {f"{key}_{suffix}": plain[key] for key in ("step_time_s", "peak_memory_gib")}


def _same_losses(figures: Figures, ours: list[float], expected: list[float], of: str = f"part {PROXY}") -> Figures:
    """Add the largest difference of the losses. Raises PartFailed: it is not small."""
    difference = largest_difference(ours, expected)
    figures = {**figures, "largest_relative_difference": difference}
    if difference > SAME_LOSS:
        raise PartFailed(f"losses differ from {of} by {difference:.2g}; at most {SAME_LOSS:g} is expected", figures)
    return figures


def _mean_decrease(curve: Sequence[float]) -> float:
    return curve[0] - statistics.fmean(curve[1:])
