"""Other ways to compute the same layers: recomputed modules, experts of a fixed size."""

from cloudai_mbridge.gpu_check import sweep
from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.proxy import PROXY, RECIPE, SAME_LOSS, SIZES, proxy_losses, with_share
from cloudai_mbridge.gpu_check.sweep import Trained, Training

EXPERTS = "qwen3_30b_a3b"
# 2 of 48 layers: 1.9 B parameters. The router is forced to balance: no expert gets twice its share of 256 tokens
EXPERT_SIZES = {"num_layers": 2, "seq_length": 4096, "mb": 1, "gb": 4, "compute_dtype": "bf16", "ep": 1}
ROOM = {"model.moe_expert_capacity_factor": 2.0, "model.moe_pad_expert_input_to_capacity": True}


def recomputation(kit: Kit) -> Figures:
    """Train the proxy with recomputed modules: less memory."""
    name, expected = "recomputation", proxy_losses(kit)
    plain: Trained = kit.shared[PROXY]
    point = sweep.train(kit, name, [Training(name, RECIPE, {**SIZES, "recompute_modules": "core_attn,mlp"})]).good(name)
    figures, kept = with_share(kit, sweep.speed(point)), sweep.speed(plain.good(PROXY))
    figures |= {f"{key}_of_proxy": kept[key] for key in ("step_time_s", "peak_memory_gib")}
    figures = _same_losses(figures, sweep.losses(point), expected, f"of part {PROXY}")
    if figures["peak_memory_gib"] >= figures["peak_memory_gib_of_proxy"]:
        raise PartFailed("the peak of memory is not lower than without recomputation", figures)
    return figures


def expert_capacity(kit: Kit) -> Figures:
    """Train grouped experts without a limit, and padded to a size with room for every token: the same losses."""
    names = ("without_limit", "with_room")
    trained = sweep.train(
        kit,
        "expert_capacity",
        [Training(name, EXPERTS, EXPERT_SIZES, extra) for name, extra in zip(names, ({}, ROOM), strict=True)],
    )
    rows, missing = trained.each(names, lambda _, point: sweep.speed(point))
    figures: Figures = {**rows}
    if missing:
        raise PartFailed(missing, figures)
    expected, ours = (sweep.losses(trained.good(name)) for name in names)
    return _same_losses(figures, ours, expected, "without a limit")


def _same_losses(figures: Figures, ours: list[float], expected: list[float], of: str) -> Figures:
    difference = sweep.largest_difference(ours, expected)
    figures["largest_relative_difference"] = difference
    if difference > SAME_LOSS:
        raise PartFailed(f"losses differ from those {of} by {difference:.2g}; at most {SAME_LOSS:g}", figures)
    return figures
