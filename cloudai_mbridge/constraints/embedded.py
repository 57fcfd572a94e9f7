"""Rules E01...: what the embedded loop cannot do, so that no argument is silently ignored."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.models.values.number_formats import FP8, IN_16_OR_32_BITS, QUANTIZED
from cloudai_mbridge.recipes.apply import lacked_by, lacking, unsupported_args, why_unsupported

_DTYPES = (*IN_16_OR_32_BITS, *QUANTIZED)


def e01_every_argument_reaches_the_training(point: Point) -> Answer:
    """No argument is set that the embedded loop would have to ignore.

    A benchmark that drops an option measures something else than it says.

    Pass: tp=2. Fail: use_megatron_fsdp=true.
    Source: `cloudai_mbridge.recipes.apply`.
    """
    if not point.is_embedded or not (ignored := unsupported_args(point.args)):
        return None
    fact = f"the embedded launcher does not take {', '.join(f'{name} ({why_unsupported(name)})' for name in ignored)}"
    remedy = "follow the hints in parentheses, remove these arguments, or set launcher = 'megatron_bridge'"
    return Violation("E01", "cmd_args", fact, remedy, ignored)


def e02_the_machine_has_what_the_point_needs(point: Point) -> Answer:
    """The loop has the number format, and a machine that is known to lack a GPU or Transformer Engine needs neither.

    FP8 and FP4 are Transformer Engine's. "fp8" is one of its formats with the `fp8_recipe` that says which.

    Pass: compute_dtype="bf16". Fail: compute_dtype="fp8" without fp8_recipe; "fp8_mx" on a machine without a GPU.
    Source: `cloudai_mbridge.recipes.container`, `cloudai_mbridge.training.schema.not_done`.
    """
    dtype, fp8_recipe = point.args.compute_dtype, point.args.fp8_recipe
    if not point.is_embedded:
        return None
    if dtype not in _DTYPES:
        fact = f"the embedded launcher does not train in {dtype!r}"
        if dtype == FP8:
            fact += f" with fp8_recipe = {fp8_recipe!r}"
        return point.breaks("E02", "compute_dtype", fact, f"use one of {', '.join(_DTYPES)}", "compute_dtype")
    if fp8_recipe:
        fact = f"fp8_recipe = {fp8_recipe!r} has no effect beside compute_dtype = {dtype!r}"
        return point.breaks("E02", "fp8_recipe", fact, f"remove it, or set compute_dtype = {FP8!r}", "fp8_recipe")
    if not (lacked := lacked_by(point.args, lacking(point.system))):
        return None
    fact = f"this machine lacks {', '.join(f'{what} for {name}' for name, what in lacked.items())}"
    return point.breaks("E02", next(iter(lacked)), fact, "remove them, or run on a Slurm system", *lacked)


def e03_there_are_steps_to_measure(point: Point) -> Answer:
    """The number of steps is positive.

    Pass: max_steps=10. Fail: max_steps=0.
    Source: a run of no steps has no step time.
    """
    steps = point.args.max_steps
    if not point.is_embedded or (steps is not None and steps > 0):
        return None
    return point.breaks("E03", "max_steps", f"max_steps is {steps}", "use at least 1", "max_steps")


def e04_containers_need_slurm(point: Point) -> Answer:
    """A container image needs a Slurm system: this machine runs points in its own environment.

    Pass: container_image="". Fail: container_image="nemo" on a local system.
    Source: `cloudai_mbridge.launch.script`.
    """
    image = point.args.container_image
    if not (point.is_embedded and image and isinstance(point.system, LocalSystem)):
        return None
    remedy = "remove container_image, or run on a Slurm system"
    return point.breaks("E04", "container_image", "a local system has no containers", remedy, image=image)


def e05_the_loop_builds_the_model(point: Point) -> Answer:
    """The embedded loop can build the recipe's model.

    Pass: model_recipe_name="llama3_8b". Fail: model_recipe_name="nemotron_3_nano". Not evaluated: no recipe.
    Source: `not_embedded` in the recipe's file.
    """
    if not point.is_embedded:
        return None
    if point.recipe is None:
        return NotEvaluated("E05", "recipe")
    if not point.recipe.not_embedded:
        return None
    fact = f"the embedded loop cannot build {point.recipe.name} because of {point.recipe.not_embedded}"
    remedy = "set launcher = 'megatron_bridge', or choose another recipe"
    return point.breaks("E05", "model_recipe_name", fact, remedy, model_recipe_name=point.recipe.name)


def e06_replicated_experts_stay_equal(point: Point) -> Answer:
    """Without expert parallelism, experts are sharded as the dense layers are.

    With ep=1 Megatron-Core reduces the gradients of the experts over the groups of the dense layers: experts that are
    replicated over tensor-parallel ranks would drift apart, without an error.

    Pass: experts, tp=2, ep=1, et=2. Fail: experts, tp=2, ep=1, et=1. Not evaluated: no recipe.
    Source: two processes against one: the loss differs by 1e-2 after 8 steps.
    """
    if not point.is_embedded:
        return None
    if point.recipe is None:
        return NotEvaluated("E06", "recipe")
    tp, et = point.tp, point.args.et
    if not point.num_moe_experts or (point.args.ep or 1) > 1 or et in (None, tp):
        return None
    fact = f"et = {et} differs from tp = {tp} while ep = 1: Megatron-Core trains the experts incorrectly"
    return point.breaks("E06", "et", fact, f"use et = {tp}, or ep > 1", "et", "tp", ep=1)
