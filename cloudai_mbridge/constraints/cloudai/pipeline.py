"""C02, C08, C18: how layers are split over pipeline stages."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point
from cloudai_mbridge.models.values.pipeline_layout import layout_fault

# (pp, vp) for which the upstream DeepSeek V3 recipe has a layout of its own
_DEEPSEEK_V3_SPLITS = ((1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4))


def c02_layers_fill_the_pipeline(point: Point) -> Answer:
    """Every pipeline stage gets the same number of layers, or an explicit layout assigns them.

    Megatron gives every stage num_layers/pp layers (embedding and loss count as one each where the recipe says so) and
    refuses a remainder. An explicit layout must name pp*vp stages and exactly the model's layers.

    Pass: num_layers=32, pp=4. Fail: num_layers=61, pp=4. Not evaluated: the number of layers is unknown.
    Source: CloudAI MegatronBridge workload, constraint 2 (a placeholder there); Megatron-Core TransformerConfig.
    """
    if (layers := point.num_layers) is None:
        return NotEvaluated("C02", "num_layers")
    if point.pp < 1:
        return NotEvaluated("C02", "a positive pp")
    vp = point.args.vp
    if layout := point.pipeline_layout:
        mtp = layout.count("m") if point.mtp_num_layers is None else point.mtp_num_layers
        if (fault := layout_fault(layout, point.pp, vp, layers, mtp)) is None:
            return None
        fact = f"the layout {layout!r} does not fit: {fault}"
        return point.violation(
            "C02", "pipeline_model_parallel_layout", fact, "fix the layout", "num_layers", "pp", "vp"
        )
    split = _layers_to_split(point, layers)
    if split % point.pp == 0:
        return None
    fact = f"{split} layers are not divisible by pp = {point.pp}"
    remedy = "use a pp that divides the layers, or an explicit pipeline_model_parallel_layout"
    return point.violation("C02", "pp", fact, remedy, "num_layers", "pp", "vp")


def c08_stages_divide_into_virtual_ones(point: Point) -> Answer:
    """The layers of a stage divide evenly into its vp virtual stages.

    Pass: num_layers=32, pp=4, vp=8. Fail: num_layers=32, pp=4, vp=3. Not evaluated: the number of layers is unknown, or
    pp does not divide it (C02).
    Source: CloudAI MegatronBridge workload, constraint 8 (a placeholder there); Megatron-Core TransformerConfig.
    """
    if (vp := point.args.vp) in (None, 1):
        return None
    if (layers := point.num_layers) is None:
        return NotEvaluated("C08", "num_layers")
    if point.pipeline_layout:
        return None  # C02 checks the layout's stages
    split = _layers_to_split(point, layers)
    if point.pp < 1 or split % point.pp:
        return NotEvaluated("C08", "a pp that divides the layers")
    per_stage = split // point.pp
    if vp is not None and vp >= 1 and per_stage % vp == 0:
        return None
    allowed = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
    fact = f"{vp} virtual stages do not divide the {per_stage} layers of a stage"
    return point.violation("C08", "vp", fact, f"use one of {', '.join(map(str, allowed))}", "num_layers", "pp", "vp")


def _layers_to_split(point: Point, layers: int) -> int:
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return layers + sum(bool(point.of_recipe(name)) for name in counted)


def c18_deepseek_v3_is_split_as_its_recipe_can(point: Point) -> Answer:
    """DeepSeek V3 runs with a (pp, vp) for which its recipe has a layout, or with an explicit one.

    Its 61 layers divide by no useful pp; the upstream recipe has layouts for seven combinations and fails for others.

    Pass: model_recipe_name="deepseek_v3", pp=4, vp=4. Fail: model_recipe_name="deepseek_v3", pp=2, vp=8.
    Source: CloudAI MegatronBridge workload, constraint 18, which does not look at layouts.
    """
    return None if point.pipeline_layout else split_as_cloudai_decides(point)


def split_as_cloudai_decides(point: Point) -> Answer:
    """C18 as CloudAI decides it, whatever the layout."""
    name = point.args.model_recipe_name.lower()
    if "deepseek_v3" not in name and "deepseekv3" not in name:
        return None
    split = (point.pp, 1 if point.args.vp is None else point.args.vp)
    if split in _DEEPSEEK_V3_SPLITS:
        return None
    known = ", ".join(f"({pp},{vp})" for pp, vp in _DEEPSEEK_V3_SPLITS)
    fact = f"the recipe has no layout for (pp,vp) = ({split[0]},{split[1]})"
    remedy = f"use one of {known}, or an explicit pipeline_model_parallel_layout"
    return point.violation("C18", "pp", fact, remedy, "pp", "vp")
