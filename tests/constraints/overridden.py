"""Random points of the embedded loop whose `extra_cmd_args` replace sizes of the model."""

import random
from typing import Any

Draw = tuple[str, dict[str, Any], dict[str, str], int]

_SPLITS: dict[str, tuple[str, ...]] = {
    "model.num_layers_in_first_pipeline_stage": ("1", "2", "3", "0"),
    "model.num_layers_in_last_pipeline_stage": ("1", "2", "3", "0"),
    "model.account_for_embedding_in_pipeline_split": ("true", "false"),
    "model.account_for_loss_in_pipeline_split": ("true", "false"),
}
_OF_ATTENTION = {
    "model.num_attention_heads": ("1", "2", "3", "4", "6", "8", "0"),
    "model.num_query_groups": ("1", "2", "3", "4"),
}
_OTHERS: dict[str, tuple[str, ...]] = {
    "model.ffn_hidden_size": ("48", "33", "30"),
    "model.sequence_parallel": ("true", "false"),
    "model.microbatch_group_size_per_vp_stage": ("2", "3", "4", "6"),
    "model.should_pad_vocab": ("true", "false"),
    "optimizer.use_distributed_optimizer": ("true", "false"),
}
_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "model.moe_ffn_hidden_size": ("24", "18", "15"),
    "model.moe_shared_expert_intermediate_size": ("16", "18", "15"),
    "model.moe_router_topk": ("1", "2", "3", "4", "5", "99"),
    "model.moe_router_num_groups": ("1", "2", "3", "4"),
    "model.moe_router_group_topk": ("1", "2", "3", "5"),
    "model.moe_router_pre_softmax": ("true",),
    "model.moe_router_score_function": ('"sigmoid"',),
    "model.moe_layer_freq": ("1", "2", "0", "[1, 0, 1, 0]", "[0, 1]", "[0, 0, 0, 1]"),
}
_HYBRID = ('"*-*-"', '"*E*E"', '"*-*"', '"----"', '"*-|*-"', '"*x*-"')


def overridden_points(number: int, seed: int) -> list[Draw]:
    """Return random points by their ranks and world sizes: the model, arguments, overrides, the rank to be built."""
    draw = random.Random(seed)
    found = [_point(draw) for _ in range(number)]
    return sorted(found, key=lambda point: (point[1]["num_gpus"], point[3]))


def _point(draw: random.Random) -> Draw:
    name = draw.choice(("dense", "dense", "odd", "experts", "experts", "latent", "hybrid"))
    has_experts = name in ("experts", "hybrid")
    tp, pp, cp = draw.choice((1, 1, 1, 2, 2, 3)), draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 1, 2))
    dp = draw.choice((1, 2, 4))
    args: dict[str, Any] = {"num_gpus": dp * tp * pp * cp, "tp": tp, "pp": pp, "cp": cp, "seq_length": 24}
    args["gb"] = dp * draw.choice((2, 4, 4, 5, 8))
    if name != "hybrid" and draw.random() < 0.3:
        args["vp"] = 2
    if draw.random() < 0.6:
        args["num_layers"] = draw.choice((4, 5, 6, 7, 8, 8, 10))
    if has_experts and draw.random() < 0.5:
        args |= {"ep": draw.choice((1, 2, 2, 4)), "et": draw.choice((1, tp))}
    if draw.random() < 0.15:
        args["num_distributed_optimizer_instances"] = draw.choice((2, 2, 4))
    if draw.random() < 0.1:
        args["vocab_size"] = draw.choice((126, 129))
    keys = {**_OF_ATTENTION, **_OTHERS}
    if has_experts:
        keys |= _OF_EXPERTS
    extra = {key: draw.choice(keys[key]) for key in draw.sample(sorted(keys), draw.choice((0, 1, 1, 2, 3)))}
    predicted = draw.choice((0, 0, 0, 1, 2)) if name != "hybrid" else 0
    if predicted:  # it exchanges tokens between context-parallel ranks, which would be moved
        args |= {"cp": 1, "num_gpus": args["num_gpus"] // cp}
        extra["model.mtp_num_layers"] = str(predicted)
    way = draw.choice(("even", "numbers", "numbers", "layout", "layout"))
    if name == "hybrid" and draw.random() < 0.4:
        extra["model.hybrid_layer_pattern"] = draw.choice(_HYBRID)
    if way == "numbers" or draw.random() < 0.03:
        extra |= {key: draw.choice(_SPLITS[key]) for key in draw.sample(sorted(_SPLITS), draw.choice((1, 1, 2)))}
    if (way == "layout" and name != "hybrid") or draw.random() < 0.03:
        args["pipeline_model_parallel_layout"] = _layout(draw, args, predicted)
    return name, args, extra, draw.choice((0, args["num_gpus"] - 1))


def _layout(draw: random.Random, args: dict[str, Any], predicted: int) -> str:
    """Return layers at random over stages; some are of other numbers. The last stage predicts, as in the loop."""
    layers, stages = args.get("num_layers", 4), args["pp"] * (args.get("vp") or draw.choice((1, 1, 2)))
    if draw.random() < 0.1:
        layers, stages = layers + draw.choice((-1, 1)), stages + draw.choice((0, 1))
    bounds = sorted(draw.randint(0, layers) for _ in range(stages - 1))
    counts = [end - start for start, end in zip((0, *bounds), (*bounds, layers), strict=True)]
    if draw.random() < 0.1:
        predicted += 1
    return "|".join(
        ("E" if i == 0 else "") + "t" * count + ("m" * predicted + "L" if i == stages - 1 else "")
        for i, count in enumerate(counts)
    )
