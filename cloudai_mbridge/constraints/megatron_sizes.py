"""M01-M13, M31-M33: sizes that Megatron-Core rejects, or hangs or crashes on, and the placement of ranks on nodes.

Rules that need the model give no verdict without a recipe. `tests/constraints/test_oracle.py` compares the M rules with
Megatron-Core on thousands of points. Two stages with virtual stages and without overlapped P2P, which silently train
wrongly, cannot be requested: the loop overlaps P2P whenever vp is set.
"""

import math
from collections.abc import Iterable
from typing import Any

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation
from cloudai_mbridge.constraints.stages import layers_of_stages, uneven_by
from cloudai_mbridge.estimate.architecture import SIZES, sizes_of
from cloudai_mbridge.models.pipeline_layout import SplitFault
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.recipes.apply import lacking
from cloudai_mbridge.training.compat.versions import TRANSFORMER_ENGINE

_GROUP = "microbatch_group_size_per_vp_stage"


def gpus_per_node(point: Point) -> int | None:
    """Return the limit of ranks per node, or None if unlimited."""
    return point.args.gpus_per_node or (point.system.gpus_per_node if point.system else None)


def num_nodes(point: Point) -> int:
    """Return the scenario's number of nodes, else as few as take all ranks; this machine is one node."""
    if point.num_nodes is not None:
        return point.num_nodes
    if isinstance(point.system, LocalSystem):
        return 1
    per_node = gpus_per_node(point)
    return max(1, -(-point.args.num_gpus // per_node)) if per_node else 1


def place(point: Point) -> tuple[int, int]:
    """Return how many nodes a point has, and how many ranks on each. Only for points that pass M01."""
    nodes = num_nodes(point)
    return nodes, point.args.num_gpus // nodes


def m01_ranks_fit_the_nodes(point: Point) -> Answer:
    """The ranks spread evenly over the nodes and no node gets more than it has GPUs.

    torchrun starts the same number of ranks on every node; more ranks than GPUs on a node crash at device selection.

    Pass: num_gpus=8, num_nodes=2, gpus_per_node=4. Fail: num_gpus=8, num_nodes=1, gpus_per_node=4.
    Source: torch.distributed.run, --nnodes and --nproc-per-node.
    """
    if point.system is None:
        return NotEvaluated("M01", "system")
    ranks, nodes, limit = point.args.num_gpus, num_nodes(point), gpus_per_node(point)
    operands = {"num_gpus": ranks, "num_nodes": nodes, "gpus_per_node": limit}
    if isinstance(point.system, LocalSystem) and nodes != 1:
        return Violation("M01", "num_nodes", "this machine is one node", "remove num_nodes or set it to 1", operands)
    if ranks < 1 or nodes < 1 or ranks % nodes:
        fact = f"{ranks} ranks cannot be spread evenly over {nodes} nodes"
        return point.violation("M01", "num_gpus", fact, f"use a positive multiple of {max(nodes, 1)}", **operands)
    if limit is not None and ranks // nodes > limit:
        fact = f"{ranks // nodes} ranks per node exceed {limit} GPUs per node"
        remedy = f"use at least {-(-ranks // limit)} nodes, or fewer GPUs"
        return point.violation("M01", "num_gpus", fact, remedy, **operands)
    return None


_SIZES = (
    *("num_gpus", "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb"),
    *("seq_length", "hidden_size", "num_layers", "num_moe_experts", "vocab_size"),
)


_MOST = {name: sizes_of(name)[-1] for name in _SIZES if name in SIZES}


def m02_sizes_are_positive(point: Point) -> Answer:
    """Every size that is given is positive, also of the model in `extra_cmd_args`, and not beyond any model's.

    CloudAI reads 0 as "not given" and lets pairs of negative sizes through; Megatron divides by them.

    Pass: tp=1. Fail: tp=0.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    bad = {name: value for name in _SIZES if (value := getattr(point.args, name)) is not None and value < 1}
    if bad:
        return point.violation("M02", next(iter(bad)), "sizes must be positive", "use at least 1", **bad)
    for name, most in _MOST.items():
        if (value := getattr(point.args, name)) is not None and value > most:
            return _beyond(f"cmd_args.{name}", name, value)
    for key, value in point.settings.items():
        section, _, name = key.partition(".")
        if section == "model" and name in SIZES and type(value) is int and value not in sizes_of(name):
            return _beyond(f"extra_cmd_args.{key}", name, value)
    return None


def _beyond(where: str, name: str, value: int) -> Violation:
    sizes = sizes_of(name)
    remedy = f"use {sizes.start} to {sizes.stop - 1}"
    return Violation("M02", where, f"{value} is not a size of a model", remedy, {name: value})


def m03_virtual_stages_need_a_pipeline(point: Point) -> Answer:
    """Virtual pipeline stages need more than one pipeline stage.

    Interleaving passes micro-batches on between ranks; with one rank there is no other to pass them to.

    Pass: pp=2, vp=2. Fail: pp=1, vp=2.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    vp = point.vp
    if (vp or 1) == 1 or point.pp > 1:
        return None
    return point.violation("M03", "vp", f"vp = {vp} needs pp > 1", "set vp to 1 or pp above 1", "vp", "pp")


def m04_interleaving_takes_whole_rounds(point: Point) -> Answer:
    """With virtual stages, the number of micro-batches per step is a multiple of pp.

    The interleaved schedule works in rounds of pp micro-batches, or of model.microbatch_group_size_per_vp_stage, whose
    last may be incomplete, but not below pp.

    Pass: pp=2, vp=2, gb=8, mb=1, dp=1. Fail: gb=9. Not evaluated: mb or gb is unknown, or C04 is broken.
    Source: megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving.
    """
    if (point.vp or 1) == 1 or point.pp <= 1:
        return None
    per_round = (point.args.mb or 0) * point.dp
    if per_round <= 0 or not point.args.gb or point.args.gb % per_round:
        return NotEvaluated("M04", "a number of micro-batches")
    micro_batches, shown = point.args.gb // per_round, ("gb", "mb", "dp", "pp", "vp")
    if (group := point.size(_GROUP)) is not None and group != point.pp:
        if point.pp <= group <= micro_batches and not 0 < micro_batches % group < point.pp:
            return None
        fact = f"{micro_batches} micro-batches per step do not make rounds of {_GROUP} = {group}"
        remedy = f"use a {_GROUP} from pp to their number, with a remainder of 0 or at least pp"
        return point.violation("M04", "gb", fact, remedy, *shown, **{_GROUP: group})
    if micro_batches % point.pp == 0:
        return None
    fact = f"{micro_batches} micro-batches per step are not a multiple of pp = {point.pp}"
    remedy = f"use a gb that is a multiple of mb*dp*pp = {per_round * point.pp}"
    return point.violation("M04", "gb", fact, remedy, *shown)


def m05_context_parallel_halves_divide_the_sequence(point: Point) -> Answer:
    """With context parallelism, the sequence length is a multiple of 2*cp.

    Each rank takes one chunk from the front and one from the back of the sequence: causal attention is balanced then.

    Pass: seq_length=4096, cp=2. Fail: seq_length=4098, cp=2. Not evaluated: the sequence length is unknown.
    Source: megatron.core.utils.get_batch_on_this_cp_rank.
    """
    if point.cp <= 1:
        return None
    if (length := point.seq_length) is None:
        return NotEvaluated("M05", "seq_length")
    if length % (2 * point.cp) == 0:
        return None
    fact = f"{length} is not divisible by 2*cp = {2 * point.cp}"
    return point.violation("M05", "seq_length", fact, f"use a multiple of {2 * point.cp}", "seq_length", "cp")


def m06_sequence_parallel_shares_are_whole(point: Point) -> Answer:
    """With tensor parallelism, tp divides the sequence (of one context-parallel rank).

    Sequence parallelism is on whenever tp > 1: every tensor-parallel rank keeps an equal part of the sequence.
    At tp = 1 it is always off. `extra_cmd_args` may switch it off for a model without experts.

    Pass: seq_length=4096, tp=2. Fail: seq_length=4097, tp=2. Not evaluated: the sequence length is unknown, or
    `extra_cmd_args` set model.sequence_parallel for the upstream launcher.
    Source: megatron.core.tensor_parallel.mappings, model_parallel_config, transformer.moe.moe_layer.
    """
    if point.tp <= 1 or point.cp < 1:
        return None
    name = "sequence_parallel"
    if point.of_recipe(name) is not None and not point.is_on(name):
        if not point.has_expert_layers:
            return None
        fact, remedy = (
            f"experts do not train with tp = {point.tp} without {name}",
            f"remove model.{name}, or set tp to 1",
        )
        return point.violation("M06", "tp", fact, remedy, "tp", "num_moe_experts")
    if (length := point.seq_length) is None:
        return NotEvaluated("M06", "seq_length")
    if length % point.cp or (length // point.cp) % point.tp == 0:
        return None
    fact = f"{length} is not divisible by tp*cp = {point.tp * point.cp}"
    return point.violation(
        "M06", "seq_length", fact, f"use a multiple of {point.tp * point.cp}", "seq_length", "tp", "cp"
    )


def m07_ranks_fill_the_expert_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of et*ep*pp, et being 1 if missing and ep > 1.

    C07 checks this only if et is given.

    Pass: num_gpus=8, tp=2, ep=8. Fail: num_gpus=8, tp=4, ep=16.
    Not evaluated: et is not given to the upstream launcher.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    if (point.args.ep or 1) == 1 and point.args.et is None:
        return None  # C01 reports it
    if point.args.et is None and not (point.is_embedded or point.is_resolved):
        return NotEvaluated("M07", "et, which upstream recipes set themselves")
    et, ep = point.expert_tp, point.args.ep or 1
    size = et * ep * point.pp
    if size < 1 or point.args.num_gpus % size == 0:
        return None
    fact = f"num_gpus = {point.args.num_gpus} is not divisible by et*ep*pp = {size}"
    remedy = "use smaller ep or pp, or set et to 1"
    return point.violation("M07", "ep", fact, remedy, "num_gpus", et=et, ep=ep, pp=point.pp)


def m08_heads_divide_over_tensor_ranks(point: Point) -> Answer:
    """tp divides the attention heads, and rotary positions halve the width of a head.

    Pass: 32 heads, tp=8. Fail: 32 heads, tp=12; 6 heads of a hidden size of 32, whose width is 5. Not evaluated: no
    recipe.
    Source: megatron.core.transformer.TransformerConfig, models.common.embeddings.rope_utils.
    """
    if (heads := point.num_attention_heads) is None:
        return NotEvaluated("M08", "recipe")
    if point.tp > 0 and heads % point.tp:
        fact = f"{heads} heads are not divisible by tp = {point.tp}"
        return point.violation("M08", "tp", fact, _divisors(heads), num_attention_heads=heads, tp=point.tp)
    width = point.head_width
    is_rotary = point.has_rotary_heads and width is not None and width % 2 == 1
    if width is None or not (is_rotary or width < 1) or not point.has_attention:
        return None
    fact = f"heads of a width of {width} cannot be {'rotated' if is_rotary else 'built'}"
    shown = {"hidden_size": point.hidden_size, "num_attention_heads": heads}
    where = _set_at(point, ("kv_channels", "num_attention_heads"), "hidden_size")
    return Violation("M08", where, fact, "choose heads of an even width", shown)


def m09_query_groups_divide_or_repeat(point: Point) -> Answer:
    """The key-value groups divide the heads, and are a multiple or a divisor of tp, which divides their projection.

    Pass: 8 groups, tp=4 or 16. Fail: 8 groups, tp=3; 3 groups of 4 heads. Not evaluated: no recipe.
    Source: megatron.core.transformer.TransformerConfig and attention (a group has the same number of heads).
    """
    if (groups := point.num_query_groups) is None or (heads := point.num_attention_heads) is None:
        return NotEvaluated("M09", "recipe with num_query_groups")
    if groups < 1 or point.tp < 1 or groups == heads:
        return None  # M02 or M08 reports it
    if heads % groups and point.has_attention:
        fact = f"{heads} heads are not divisible by {groups} key-value groups"
        shown = {"num_attention_heads": heads, "num_query_groups": groups}
        where = _set_at(point, ("num_query_groups", "num_attention_heads"), "model_recipe_name")
        return Violation("M09", where, fact, _divisors(heads), shown)
    if point.is_latent and groups < point.tp:
        fact = f"multi-latent attention cannot share {groups} key-value groups among tp = {point.tp}"
        return point.violation("M09", "tp", fact, "remove model.num_query_groups", num_query_groups=groups, tp=point.tp)
    if groups % point.tp == 0 or point.tp % groups == 0:
        queries = heads * (2 if point.is_on("attention_output_gate") else 1)
        width = (queries + 2 * groups) * (point.head_width or 0)
        if width % point.tp == 0 or point.is_latent or not point.has_attention:
            return None
        fact = f"queries, keys and values of {width} are not divisible by tp = {point.tp}"
        shown = {"num_attention_heads": heads, "num_query_groups": groups, "tp": point.tp}
        return point.violation("M09", "tp", fact, "use another tp, or as many groups", **shown)
    fact = f"{groups} key-value groups are neither a multiple nor a divisor of tp = {point.tp}"
    return point.violation("M09", "tp", fact, _divisors(groups), num_query_groups=groups, tp=point.tp)


def m10_feed_forward_divides_over_tensor_ranks(point: Point) -> Answer:
    """tp divides the dense feed-forward width, and et (where not given 1 with ep > 1, else tp) the experts'.

    On a machine that is known to lack Transformer Engine, tp also divides what multi-latent attention projects down to.

    Pass: ffn_hidden_size=14336, tp=8. Fail: ffn_hidden_size=100, tp=8. Not evaluated: no recipe.
    Source: megatron.core.tensor_parallel.layers (ensure_divisibility).
    """
    if (ffn := point.ffn_hidden_size) is None:
        return NotEvaluated("M10", "recipe")
    et = point.tp
    widths = {"ffn_hidden_size": (ffn, point.tp)} if point.has_dense_layers else {}
    if point.has_expert_layers:
        et = point.expert_tp
        widths["moe_ffn_hidden_size"] = (point.size("moe_ffn_hidden_size") or ffn, et)
        shared = point.size("moe_shared_expert_intermediate_size")
        widths["moe_shared_expert_intermediate_size"] = (shared or point.tp, point.tp)
    if point.is_latent and TRANSFORMER_ENGINE in lacking(point.system):
        rank, of_keys = point.size("q_lora_rank"), point.size("kv_lora_rank")
        widths["q_lora_rank"] = (rank or point.tp, point.tp)
        keys = 0 if of_keys is None else of_keys + (point.size("qk_pos_emb_head_dim") or 0)
        widths["kv_lora_rank + qk_pos_emb_head_dim"] = (keys or point.tp, point.tp)
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
    """The number of recomputed layers is positive and not more than the fullest pipeline rank has.

    With model.recompute_method uniform it is the size of groups, and divides the layers of every stage.

    Pass: recompute_num_layers=1. Fail: recompute_num_layers=0. Not evaluated: the layers of the stages are unknown.
    Source: megatron.core.transformer.TransformerConfig, message of recompute_num_layers.
    """
    if (recomputed := point.args.recompute_num_layers) is None:
        return None
    name = "recompute_num_layers"
    if recomputed < 1:
        return point.violation("M12", name, f"{recomputed} layers cannot be recomputed", "use at least 1", name)
    if point.num_layers is None or point.pp < 1:
        return NotEvaluated("M12", "num_layers")
    try:
        stages = layers_of_stages(point)
    except SplitFault:
        return NotEvaluated("M12", "a split of the layers over the stages")
    most = max(sum(stages[rank :: point.pp]) for rank in range(point.pp))
    if recomputed <= most:
        odd = [count for count in stages if count % recomputed]
        if point.of_recipe("recompute_method") != "uniform" or not odd:
            return None
        fact = f"{odd[0]} layers of a stage are not groups of {recomputed}, as recompute_method uniform has them"
        return point.violation("M12", name, fact, _divisors(odd[0]), name, "num_layers", "pp")
    fact = f"{recomputed} recomputed layers are not between 1 and the {most} of a pipeline rank"
    return point.violation("M12", name, fact, f"use 1 to {most}", name, "num_layers", "pp", **uneven_by(point))


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


def m31_tokens_choose_among_the_experts(point: Point) -> Answer:
    """Every token takes 1 to all of the experts, from groups that divide them, and layers with experts are named so.

    Group-limited routing needs equal groups, no fewer than a token chooses from, each with enough experts. Biases of
    experts need et = 1, those of the router sigmoid scores. A list of moe_layer_freq has an entry for every layer.

    Pass: 4 experts, model.moe_router_topk=4. Fail: 4 experts, model.moe_router_topk=5. Not evaluated: no recipe.
    Source: megatron.core.transformer.TransformerConfig, moe.moe_utils, models.gpt.gpt_layer_specs.
    """
    if point.recipe is None:
        return NotEvaluated("M31", "recipe")
    width, experts = "moe_ffn_hidden_size", point.num_moe_experts
    if not experts:
        if f"model.{width}" not in point.settings:
            return None
        operands = {width: point.settings[f"model.{width}"]}
        return _of_experts(point, "the model has no experts", f"remove model.{width}", operands)
    for fact, remedy, operands in (_wrong_choice(point, experts), _wrong_groups(point, experts), _wrong_layers(point)):
        if fact:
            return _of_experts(point, fact, remedy, {**operands, "num_moe_experts": experts})
    return None


def _of_experts(point: Point, fact: str, remedy: str, operands: dict[str, Any]) -> Violation:
    return Violation("M31", _set_at(point, operands, "num_moe_experts"), fact, remedy, operands)


_Wrong = tuple[str, str, dict[str, Any]]
_NOTHING: _Wrong = ("", "", {})


def _wrong_choice(point: Point, experts: int) -> _Wrong:
    topk = point.size("moe_router_topk")
    chosen, scores = 2 if topk is None else topk, point.of_recipe("moe_router_score_function") or "softmax"
    operands = {"moe_router_topk": chosen}
    if not 1 <= chosen <= experts and point.has_expert_layers:
        return f"a token cannot choose {chosen} of {experts} experts", f"use 1 to {experts}", operands
    is_sinkhorn = point.of_recipe("moe_router_load_balancing_type") == "sinkhorn"
    if chosen == 1 and scores == "softmax" and not (is_sinkhorn or point.is_on("moe_router_pre_softmax")):
        remedy = "set model.moe_router_pre_softmax to true"
        return "the softmax over one chosen expert has no gradient", remedy, operands
    if point.is_on("moe_router_enable_expert_bias") and scores != "sigmoid":
        remedy = "set model.moe_router_score_function to sigmoid"
        return "biases of experts in routing need sigmoid scores", remedy, {"moe_router_score_function": scores}
    if point.args.et not in (None, 1) and point.has_biased_experts:
        return "experts with biases are not split", "set et to 1", {"et": point.args.et, "add_bias_linear": True}
    return _NOTHING


def _wrong_groups(point: Point, experts: int) -> _Wrong:
    if not (taken := point.size("moe_router_group_topk")):
        return _NOTHING
    groups, chosen = point.size("moe_router_num_groups"), point.size("moe_router_topk") or 2
    operands = {"moe_router_group_topk": taken, "moe_router_num_groups": groups, "moe_router_topk": chosen}
    if not groups or groups < 1 or experts % groups:
        return f"{experts} experts do not make {groups} equal groups", _divisors(experts), operands
    if not 1 <= taken <= groups:
        return f"a token cannot choose from {taken} of {groups} groups", f"use 1 to {groups}", operands
    if chosen // taken > experts // groups:
        fact = f"a group of {experts // groups} experts is ranked by the best {chosen // taken} of them"
        return fact, "use fewer groups, or a larger moe_router_group_topk", operands
    return _NOTHING


def _wrong_layers(point: Point) -> _Wrong:
    freq, layers = point.of_recipe("moe_layer_freq"), point.num_layers
    if "model.moe_layer_freq" not in point.settings or point.layer_pattern is not None or layers is None:
        return _NOTHING  # a recipe's list is cut or extended
    remedy = "use a positive number, or a list with a 0 or 1 for every layer"
    if isinstance(freq, list) and (len(freq) != layers or not {*map(str, freq)} <= {"0", "1"}):
        return f"moe_layer_freq has {len(freq)} entries for {layers} layers", remedy, {"moe_layer_freq": freq}
    if isinstance(freq, int) and freq < 1:
        return f"moe_layer_freq = {freq} is no distance between layers", remedy, {"moe_layer_freq": freq}
    return _NOTHING


def m32_optimizer_instances_divide_the_replicas(point: Point) -> Answer:
    """Several distributed-optimizer instances divide the data-parallel ranks, of the model (dp*cp) and of an expert.

    Each instance has all shards once. They need the distributed optimizer, or Megatron-FSDP.

    Pass: num_gpus=16, num_distributed_optimizer_instances=2. Fail: the same with ep=16.
    Not evaluated: the ranks fill no groups (C01, M07), or the upstream launcher decides sizes.
    Source: megatron.core.parallel_state.initialize_model_parallel, distributed.DistributedDataParallel.
    """
    name = "num_distributed_optimizer_instances"
    instances = point.args.num_distributed_optimizer_instances
    if instances is None or instances == 1:
        return None
    if instances < 1:
        return point.violation("M32", name, "instances must be positive", "use at least 1", name)
    model, expert = point.model_parallel_size, (point.args.ep or 1) * point.expert_tp * point.pp
    if model < 1 or expert < 1 or point.args.num_gpus % model or point.args.num_gpus % expert:
        return NotEvaluated("M32", "ranks that fill the model-parallel groups")
    ranks, of_expert = point.args.num_gpus // (point.tp * point.pp), point.args.num_gpus // expert
    if ranks % instances or of_expert % instances:
        fact = f"{instances} does not divide dp*cp = {ranks}, expert dp = {of_expert}"
        remedy = _divisors(math.gcd(ranks, of_expert))
        return point.violation("M32", name, fact, remedy, name, "num_gpus", "tp", "pp", "ep", et=point.expert_tp)
    if point.is_embedded and not point.has_distributed_optimizer:
        remedy = f"set optimizer.use_distributed_optimizer to true, or {name} to 1"
        return point.violation("M32", name, "several instances need the distributed optimizer", remedy, name)
    return None


def m33_the_vocabulary_divides_over_tensor_ranks(point: Point) -> Answer:
    """tp divides a vocabulary that is not padded; recipes pad theirs.

    Pass: vocab_size=512, tp=2. Fail: vocab_size=513, tp=2, model.should_pad_vocab=false. Not evaluated: the upstream
    launcher decides.
    Source: megatron.core.tensor_parallel.layers (VocabParallelEmbedding).
    """
    name = "should_pad_vocab"
    if point.settings.get(f"model.{name}") is not False:
        return None
    size = point.args.vocab_size or point.size("vocab_size")
    if size is None:
        return NotEvaluated("M33", "vocab_size")
    if point.tp < 1 or size % point.tp == 0:
        return None
    remedy = f"use a multiple, or remove model.{name}"
    fact = f"{size} words are not divisible by tp = {point.tp}"
    return point.violation("M33", "vocab_size", fact, remedy, vocab_size=size, tp=point.tp, **{name: False})


def _set_at(point: Point, names: Iterable[str], argument: str) -> str:
    """Return the key of `extra_cmd_args` that sets one of the model's fields, else the key of an argument."""
    keys = (f"model.{name}" for name in names)
    return next((f"extra_cmd_args.{key}" for key in keys if key in point.settings), f"cmd_args.{argument}")


def _divisors(number: int) -> str:
    small = [n for n in range(1, min(number, 256) + 1) if number % n == 0]
    return f"use one of {', '.join(map(str, small))}"
