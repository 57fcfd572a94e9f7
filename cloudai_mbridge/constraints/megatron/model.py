"""M08-M13: the model's own numbers against the parallel sizes. All need the recipe."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point


def m08_heads_divide_over_tensor_ranks(point: Point) -> Answer:
    """tp divides the attention heads.

    Pass: 32 heads, tp=8. Fail: 32 heads, tp=12. Not evaluated: no recipe.
    Source: megatron.core.transformer.TransformerConfig.
    """
    if (heads := point.of_recipe("num_attention_heads")) is None:
        return NotEvaluated("M08", "recipe")
    if point.tp < 1 or heads % point.tp == 0:
        return None
    fact = f"{heads} heads are not divisible by tp = {point.tp}"
    return point.violation("M08", "tp", fact, _divisors(heads), num_attention_heads=heads, tp=point.tp)


def m09_query_groups_divide_or_repeat(point: Point) -> Answer:
    """The key-value groups are a multiple or a divisor of tp.

    Pass: 8 groups, tp=4 or 16. Fail: 8 groups, tp=3. Not evaluated: no recipe, or one without grouped queries.
    Source: megatron.core.transformer.TransformerConfig.
    """
    if (groups := point.of_recipe("num_query_groups")) is None:
        return NotEvaluated("M09", "recipe with num_query_groups")
    if point.tp < 1 or groups % point.tp == 0 or point.tp % groups == 0:
        return None
    fact = f"{groups} key-value groups are neither a multiple nor a divisor of tp = {point.tp}"
    return point.violation("M09", "tp", fact, _divisors(groups), num_query_groups=groups, tp=point.tp)


def m10_feed_forward_divides_over_tensor_ranks(point: Point) -> Answer:
    """tp divides the dense feed-forward width, and et (where not given 1 with ep > 1, else tp) the experts'.

    Pass: ffn_hidden_size=14336, tp=8. Fail: ffn_hidden_size=100, tp=8. Not evaluated: no recipe.
    Source: megatron.core.tensor_parallel.layers (ensure_divisibility).
    """
    if (ffn := point.of_recipe("ffn_hidden_size")) is None:
        return NotEvaluated("M10", "recipe")
    et = point.tp
    widths = {"ffn_hidden_size": (ffn, point.tp)} if point.has_dense_layers else {}
    if point.num_moe_experts:
        et = point.expert_tp
        widths["moe_ffn_hidden_size"] = (point.of_recipe("moe_ffn_hidden_size") or ffn, et)
        shared = point.of_recipe("moe_shared_expert_intermediate_size")
        widths["moe_shared_expert_intermediate_size"] = (shared or point.tp, point.tp)
    for name, (width, size) in widths.items():
        if size > 0 and width % size:
            fact = f"{name} = {width} is not divisible by {size}"
            return point.violation("M10", "tp", fact, _divisors(width), **{name: width}, tp=point.tp, et=et)
    return None


def m11_experts_divide_over_expert_ranks(point: Point) -> Answer:
    """ep divides the number of experts; a dense model has none to divide.

    Pass: 128 experts, ep=8. Fail: 128 experts, ep=12; a dense model, ep=2. Not evaluated: no recipe.
    Source: megatron.core.transformer.TransformerConfig and moe.experts.
    """
    if point.recipe is None:
        return NotEvaluated("M11", "recipe")
    ep, experts = point.args.ep or 1, point.num_moe_experts
    if ep <= 1 or (experts and experts % ep == 0):
        return None
    fact, remedy = "the model has no experts", "set ep to 1"
    if experts:
        fact, remedy = f"{experts} experts are not divisible by ep = {ep}", _divisors(experts)
    return point.violation("M11", "ep", fact, remedy, "num_moe_experts", "ep")


def m12_recomputed_layers_exist(point: Point) -> Answer:
    """The number of recomputed layers is positive and not more than a pipeline rank has.

    Pass: recompute_num_layers=1. Fail: recompute_num_layers=0. Not evaluated: the number of layers is unknown.
    Source: megatron.core.transformer.TransformerConfig, message of recompute_num_layers.
    """
    if (recomputed := point.args.recompute_num_layers) is None:
        return None
    if (layers := point.num_layers) is None:
        return NotEvaluated("M12", "num_layers")
    most = -(-layers // max(1, point.pp))
    if 1 <= recomputed <= most:
        return None
    name = "recompute_num_layers"
    fact = f"{recomputed} recomputed layers are not between 1 and the {most} of a pipeline rank"
    return point.violation("M12", name, fact, f"use 1 to {most}", name, "num_layers", "pp")


def m13_offloaded_layers_exist(point: Point) -> Answer:
    """Fewer layers are offloaded than the model has.

    Pass: activation_offload_layers=1 of 32. Fail: 32 of 32. Not evaluated: the number of layers is unknown.
    Source: megatron.core.transformer.TransformerConfig (cpu_offloading_num_layers).
    """
    if (offloaded := point.activation_offload_layers) == 0:
        return None
    if (layers := point.num_layers) is None:
        return NotEvaluated("M13", "num_layers")
    if 0 < offloaded < layers:
        return None
    name = "activation_offload_layers"
    fact = f"{offloaded} offloaded layers are not between 1 and {layers - 1}"
    return point.violation("M13", name, fact, f"use 1 to {layers - 1}", name, "num_layers")


def _divisors(number: int) -> str:
    small = [n for n in range(1, min(number, 256) + 1) if number % n == 0]
    return f"use one of {', '.join(map(str, small))}"
