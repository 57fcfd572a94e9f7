"""The tiny recipes: trained on the CPU, then on the GPU with the same weights and data, and their losses compared."""

from cloudai_mbridge.gpu_check import sweep
from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.sweep import Training

RECIPES = ("gpt_tiny", "gpt_small", "moe_tiny")
STEPS = 10
REFERENCE = "cpu_reference"
# Relative, of the loss at any of ten steps. fp32 differs by the order of sums alone; experts may change for a token.
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
# Transformer Engine multiplies fp32 as TF32, with 10 bits of mantissa, unless cuBLAS is configured otherwise
FULL_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# Weights drawn on the CPU are the same on every device
SAME_WEIGHTS = {"model.use_cpu_initialization": True}


def cpu_reference(kit: Kit) -> Figures:
    """Train in fp32 on the CPU of any machine: without a GPU, Transformer Engine cannot run."""
    trained = sweep.train(kit, REFERENCE, _trainings("fp32"), **sweep.NO_GPU, **sweep.hide_transformer_engine(kit))
    figures, missing = trained.each(RECIPES, lambda _, point: sweep.speed(point))
    kit.shared[REFERENCE] = {recipe: sweep.losses(trained.good(recipe)) for recipe in figures}
    if missing:
        raise PartFailed(missing, figures)
    return figures


def tiny_fp32(kit: Kit) -> Figures:
    """Train the same on the GPU in fp32."""
    return _compare(kit, "fp32", **FULL_FP32)


def tiny_bf16(kit: Kit) -> Figures:
    """Train the same on the GPU in bf16."""
    return _compare(kit, "bf16")


def _compare(kit: Kit, dtype: str, **env: str) -> Figures:
    reference = kit.shared.get(REFERENCE)
    if not reference:
        raise PartFailed(f"part {REFERENCE} left no losses to compare with")

    def judge(recipe: str, point: Figures) -> Figures:
        if recipe not in reference:
            raise PartFailed(f"{recipe}: part {REFERENCE} left no losses to compare with")
        difference = sweep.largest_difference(sweep.losses(point), reference[recipe])
        return {**sweep.speed(point), "largest_relative_difference": difference}

    rows, missing = sweep.train(kit, f"tiny_{dtype}", _trainings(dtype), **env).each(RECIPES, judge)
    off = {recipe: row["largest_relative_difference"] for recipe, row in rows.items()}
    off = {recipe: difference for recipe, difference in off.items() if difference > TOLERANCE[dtype]}
    figures: Figures = {"tolerance": TOLERANCE[dtype], **rows}
    if off:
        found = ", ".join(f"{recipe} by {difference:.2g}" for recipe, difference in off.items())
        why = f"losses differ from the CPU's: {found}; at most {TOLERANCE[dtype]:g} is expected"
        missing = "; ".join(filter(None, [why, missing]))
    if missing:
        raise PartFailed(missing, figures)
    return figures


def _trainings(dtype: str) -> list[Training]:
    args = {"compute_dtype": dtype}
    return [Training(recipe, recipe, args, SAME_WEIGHTS, steps=STEPS) for recipe in RECIPES]
