"""An 8B-shaped model with few layers: speed, against a measured matmul peak; features, against the plain run."""

from cloudai_mbridge.gpu_check import sweep
from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed, PartSkipped
from cloudai_mbridge.gpu_check.sweep import Trained, Training

RECIPE = "llama3_8b"
# 4 of 32 layers: 1.9 B parameters, 35 GB of weights, gradients and optimizer; with activations it fits 80 GB
SIZES = {"num_layers": 4, "seq_length": 4096, "mb": 1, "gb": 4, "compute_dtype": "bf16"}
MATMUL = "matmul"
PROXY = "proxy"
# Relative, of the loss at any step, for the same weights and data in bf16
SAME_LOSS = 1e-2


def matmul(kit: Kit) -> Figures:
    """Measure the peak of this GPU in a large bf16 matrix product."""
    figures = kit.worker("matmul", log="matmul")
    kit.shared[MATMUL] = figures["tflops"]
    return figures


def proxy(kit: Kit) -> Figures:
    """Train the proxy in bf16, with Transformer Engine if it can be imported."""
    trained = sweep.train(kit, PROXY, [Training(PROXY, RECIPE, SIZES)])
    kit.shared[PROXY] = trained
    return with_share(kit, sweep.speed(trained.good(PROXY)))


def without_transformer_engine(kit: Kit) -> Figures:
    """Train the proxy on local layers, with Transformer Engine hidden from the process."""
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"part {PROXY} has run without it already: {kit.device.no_transformer_engine}")
    name = "without_transformer_engine"
    point = sweep.train(kit, name, [Training(name, RECIPE, SIZES)], **sweep.hide_transformer_engine(kit)).good(name)
    figures = with_share(kit, sweep.speed(point))
    if figures["transformer_engine"]:
        raise PartFailed("Transformer Engine was used although it was hidden", figures)
    difference = sweep.largest_difference(sweep.losses(point), proxy_losses(kit))
    figures["largest_relative_difference"] = difference
    if difference > SAME_LOSS:
        why = f"losses differ from part {PROXY} by {difference:.2g}; at most {SAME_LOSS:g} is expected"
        raise PartFailed(why, figures)
    return figures


def distributed_optimizer(kit: Kit) -> Figures:
    """Train with and without the distributed optimizer: the same losses. Two ranks of a tiny model without a GPU."""
    if kit.device.gpu is None:
        recipe, args = "gpt_tiny", {"compute_dtype": "fp32", "num_gpus": 2}
    else:
        recipe, args = RECIPE, {**SIZES, "num_layers": 1}
    fields = ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer")
    overlap = ("ddp.overlap_param_gather",)
    trainings = [
        Training(name, recipe, args, {**dict.fromkeys(fields, on), **dict.fromkeys(() if on else overlap, False)})
        for name, on in (("with", True), ("without", False))
    ]
    trained = sweep.train(kit, "distributed_optimizer", trainings)
    rows, missing = trained.each(("with", "without"), lambda _, point: sweep.speed(point))
    figures: Figures = {**rows}
    if missing:
        raise PartFailed(missing, figures)
    difference = sweep.largest_difference(*(sweep.losses(trained.good(name)) for name in ("with", "without")))
    figures["largest_relative_difference"] = difference
    if difference > SAME_LOSS:
        raise PartFailed(f"losses differ by {difference:.2g}; at most {SAME_LOSS:g} is expected", figures)
    return figures


def with_share(kit: Kit, figures: Figures) -> Figures:
    """Add the share of the bf16 matrix product that was measured."""
    peak, rate = kit.shared.get(MATMUL), figures.get("tflops_per_gpu")
    return {**figures, "share_of_bf16_matmul_peak": rate / peak if peak and rate else None}


def proxy_losses(kit: Kit) -> list[float]:
    """Return the losses of the plain proxy. Raises PartFailed: it has not run."""
    trained = kit.shared.get(PROXY)
    if not isinstance(trained, Trained):
        raise PartFailed(f"part {PROXY} left nothing to compare with")
    return sweep.losses(trained.good(PROXY))
