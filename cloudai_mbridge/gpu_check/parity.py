"""The tiny recipes: trained on the CPU, then on the GPU with the same weights and data, and their losses compared."""

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.sweep import NO_GPU, Training, largest_difference, losses, speed, train

RECIPES = ("gpt_tiny", "gpt_small", "moe_tiny")
STEPS = 10
REFERENCE = "cpu_reference"
# Relative, of the loss at any of ten steps. fp32 differs by the order of sums alone; experts may change for a token.
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
# Weights drawn on the CPU are the same on every device
SAME_WEIGHTS = {"model.use_cpu_initialization": True}


def cpu_reference(kit: Kit) -> Figures:
    """Train in fp32 on the CPU, whatever else the machine has."""
    trained = train(kit, REFERENCE, _trainings("fp32"), **NO_GPU)
    kit.shared[REFERENCE] = {recipe: losses(trained.good(recipe)) for recipe in RECIPES}
    return {recipe: speed(trained.good(recipe)) for recipe in RECIPES}


def tiny_fp32(kit: Kit) -> Figures:
    """Train the same on the GPU in fp32."""
    return _compare(kit, "fp32")


def tiny_bf16(kit: Kit) -> Figures:
    """Train the same on the GPU in bf16."""
    return _compare(kit, "bf16")


def _compare(kit: Kit, dtype: str) -> Figures:
    if (reference := kit.shared.get(REFERENCE)) is None:
        raise PartFailed(f"part {REFERENCE} left no losses to compare with")
    trained = train(kit, f"tiny_{dtype}", _trainings(dtype))
    figures: Figures = {"tolerance": TOLERANCE[dtype]}
    for recipe in RECIPES:
        point = trained.good(recipe)
        difference = largest_difference(losses(point), reference[recipe])
        figures[recipe] = {**speed(point), "largest_relative_difference": difference}
    off = [recipe for recipe in RECIPES if figures[recipe]["largest_relative_difference"] > TOLERANCE[dtype]]
    if off:
        found = ", ".join(f"{recipe} by {figures[recipe]['largest_relative_difference']:.2g}" for recipe in off)
        raise PartFailed(f"losses differ from the CPU's: {found}; at most {TOLERANCE[dtype]:g} is expected", figures)
    return figures


def _trainings(dtype: str) -> list[Training]:
    args = {"compute_dtype": dtype}
    return [Training(recipe, recipe, args, SAME_WEIGHTS, steps=STEPS) for recipe in RECIPES]
