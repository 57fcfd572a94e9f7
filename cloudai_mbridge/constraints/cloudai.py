"""Rules C01-C18: CloudAI's constraints of the MegatronBridge workload, same verdict on the same inputs.

C02 and C08 accept everything in CloudAI. Here they check a known number of layers, and give no verdict on an unknown
number. C18 also accepts an explicit pipeline layout.
"""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point
from cloudai_mbridge.constraints.stages import layers_of_stages, uneven_by
from cloudai_mbridge.models.pipeline_layout import SplitFault


def c01_ranks_fill_the_model_parallel_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of tp*pp*cp.

    Megatron splits the ranks into groups of tp*pp*cp; a remainder has no group and initialisation fails.

    Pass: num_gpus=16, tp=2, pp=2, cp=2. Fail: num_gpus=12, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 1.
    """
    size = point.model_parallel_size
    if size != 0 and point.args.num_gpus % size == 0:
        return None
    fact = f"{point.args.num_gpus} is not divisible by tp*pp*cp = {size}"
    remedy = f"use a multiple of {size}, or smaller tp, pp or cp"
    return point.violation("C01", "num_gpus", fact, remedy, "num_gpus", "tp", "pp", "cp")


def c03_at_least_one_model_replica(point: Point) -> Answer:
    """The data-parallel size num_gpus // (tp*pp*cp) is not zero.

    With fewer GPUs than one copy of the model needs there is nothing to run.

    Pass: num_gpus=8, tp=8. Fail: num_gpus=4, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 3.
    """
    if point.dp != 0:
        return None
    size = point.model_parallel_size
    fact = f"data-parallel size {point.args.num_gpus} // (tp*pp*cp = {size}) is 0"
    remedy = f"use at least {size} GPUs, or smaller tp, pp or cp" if size > 0 else "use positive sizes"
    return point.violation("C03", "num_gpus", fact, remedy, "num_gpus", "tp", "pp", "cp")


def c04_global_batch_is_whole_micro_batches(point: Point) -> Answer:
    """The global batch is a multiple of mb*dp (times the optimizer instances under Megatron FSDP).

    Every data-parallel rank runs the same whole number of micro-batches per step. In the embedded loop instances do
    not count, as Megatron-Core has the batch. Not evaluated: mb or gb is absent or zero.

    Pass: num_gpus=8, tp=2, mb=2, gb=16. Fail: num_gpus=8, tp=2, mb=2, gb=20.
    Source: CloudAI MegatronBridge workload, constraint 4.
    """
    mb, gb = point.args.mb, point.args.gb
    if not mb or not gb:
        return NotEvaluated("C04", "mb and gb")
    is_counted = point.args.use_megatron_fsdp and not point.is_embedded
    instances = (point.args.num_distributed_optimizer_instances or 1) if is_counted else 1
    divisor = mb * point.dp * instances
    if divisor != 0 and gb % divisor == 0:
        return None
    factors = ["mb", "dp", *(["num_distributed_optimizer_instances"] if instances != 1 else [])]
    fact = f"{gb} is not divisible by {'*'.join(factors)} = {divisor}"
    remedy = f"use a multiple of {divisor}" if divisor else "fix num_gpus, tp, pp and cp first"
    return point.violation("C04", "gb", fact, remedy, "gb", *factors)


def c06_fsdp_stands_alone(point: Point) -> Answer:
    """Megatron FSDP runs without pipeline, context and virtual pipeline parallelism.

    FSDP shards whole layers over the data-parallel ranks; its hooks do not know pipeline stages or split sequences.

    Pass: use_megatron_fsdp=true. Fail: use_megatron_fsdp=true, pp=2.
    Source: CloudAI MegatronBridge workload, constraint 6.
    """
    if not point.use_megatron_fsdp or (point.pp == 1 and point.cp == 1 and point.args.vp in (None, 1)):
        return None
    fact = "Megatron FSDP needs pp = cp = vp = 1"
    remedy = "set pp, cp and vp to 1, or use_megatron_fsdp to false"
    return point.violation("C06", "use_megatron_fsdp", fact, remedy, "pp", "cp", "vp")


def c07_ranks_fill_the_expert_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of et*ep*pp, if both et and ep are given.

    Experts have groups of their own; a remainder of ranks has none. Without et or ep: no verdict.

    Pass: num_gpus=16, et=1, ep=8, pp=2. Fail: num_gpus=16, et=1, ep=12.
    Source: CloudAI MegatronBridge workload, constraint 7.
    """
    et, ep = point.args.et, point.args.ep
    if et is None or ep is None:
        return None
    size = et * ep * point.pp
    if size != 0 and point.args.num_gpus % size == 0:
        return None
    fact = f"num_gpus = {point.args.num_gpus} is not divisible by et*ep*pp = {size}"
    remedy = f"use a multiple of {size} GPUs, or smaller et, ep or pp" if size > 0 else "use positive et, ep and pp"
    return point.violation("C07", "ep", fact, remedy, "num_gpus", "et", "ep", "pp")


def c09_optimizer_instances_need_fsdp(point: Point) -> Answer:
    """More than one distributed-optimizer instance needs Megatron FSDP.

    Only FSDP's hybrid sharding knows replicas of the optimizer's shards in this workload. Megatron-Core's distributed
    optimizer has them, too: in the embedded loop it passes.

    Pass: num_distributed_optimizer_instances=1. Fail: num_distributed_optimizer_instances=2 without FSDP.
    Source: CloudAI MegatronBridge workload, constraint 9.
    """
    name = "num_distributed_optimizer_instances"
    instances = point.args.num_distributed_optimizer_instances
    if instances is None or instances <= 1 or point.use_megatron_fsdp or point.is_embedded:
        return None
    remedy = f"set use_megatron_fsdp to true, or {name} to 1"
    return point.violation("C09", name, f"{instances} instances need Megatron FSDP", remedy, name, "use_megatron_fsdp")


def c10_no_offloading_in_a_pipeline(point: Point) -> Answer:
    """Activation offloading runs without pipeline parallelism.

    The offload handler counts the layers of the whole model; on a pipeline stage it waits for layers of others.

    Pass: pp=1, activation_offload_layers=1. Fail: pp=2, activation_offload_layers=1.
    Source: CloudAI MegatronBridge workload, constraint 10; Megatron-Core TransformerConfig.
    """
    if point.pp <= 1 or point.activation_offload_layers <= 0:
        return None
    name = "activation_offload_layers"
    fact = f"{point.activation_offload_layers} offloaded layers need pp = 1"
    return point.violation("C10", name, fact, f"set pp to 1, or {name} to 0", "pp", name)


# (pp, vp) for which the upstream DeepSeek V3 recipe has a layout of its own
_DEEPSEEK_V3_SPLITS = ((1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4))


def c02_layers_fill_the_pipeline(point: Point) -> Answer:
    """The layers fill the stages of the pipeline, evenly or as settings of the model split them.

    Megatron gives every stage num_layers/pp layers and refuses a remainder; the embedding and the loss may count as one
    each, and the first and the last stage may have numbers of their own. An explicit layout must name pp*vp stages and
    exactly the model's layers.

    Pass: num_layers=32, pp=4. Fail: num_layers=61, pp=4. Not evaluated: the number of layers is unknown.
    Source: CloudAI MegatronBridge workload, constraint 2 (a placeholder there); Megatron-Core TransformerConfig and
    transformer_block.get_num_layers_to_build.
    """
    if point.num_layers is None:
        return NotEvaluated("C02", "num_layers")
    if point.pp < 1:
        return NotEvaluated("C02", "a positive pp")
    try:
        layers_of_stages(point)
    except SplitFault as fault:
        if fault.argument != "vp":
            shown = {"num_layers": point.num_layers, "pp": point.pp, "vp": point.args.vp, **uneven_by(point)}
            return point.violation("C02", fault.argument, fault.fact, fault.remedy, **shown)
    return None


def c08_stages_divide_into_virtual_ones(point: Point) -> Answer:
    """The layers of a stage divide evenly into its vp virtual stages; a hybrid model has none in the embedded loop.

    Pass: num_layers=32, pp=4, vp=8. Fail: num_layers=32, pp=4, vp=3. Not evaluated: the number of layers is unknown, or
    pp does not divide it (C02).
    Source: CloudAI MegatronBridge workload, constraint 8 (a placeholder there); Megatron-Core TransformerConfig.
    """
    if point.args.vp in (None, 1):
        return None
    if point.num_layers is None:
        return NotEvaluated("C08", "num_layers")
    if point.pp < 1:
        return NotEvaluated("C08", "a positive pp")
    try:
        layers_of_stages(point)
    except SplitFault as fault:
        if fault.argument == "vp":
            shown = {"num_layers": point.num_layers, "pp": point.pp, "vp": point.args.vp, **uneven_by(point)}
            return point.violation("C08", "vp", fault.fact, fault.remedy, **shown)
        return None if point.pipeline_layout else NotEvaluated("C08", "a pp that divides the layers")
    return None


def c18_deepseek_v3_is_split_as_its_recipe_can(point: Point) -> Answer:
    """DeepSeek V3 runs with a (pp, vp) for which its recipe has a layout, or with an explicit one.

    Its 61 layers divide by no useful pp; the upstream recipe has layouts for seven combinations and fails for others.
    The embedded loop also trains it with fewer layers: there it passes, and C02 judges the stages.

    Pass: model_recipe_name="deepseek_v3", pp=4, vp=4. Fail: model_recipe_name="deepseek_v3", pp=2, vp=8.
    Source: CloudAI MegatronBridge workload, constraint 18, which does not look at layouts.
    """
    return None if point.is_embedded or point.pipeline_layout else split_as_cloudai_decides(point)


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


_SHOWN = ("cuda_graph_impl", "cuda_graph_scope")
_IMPLEMENTATIONS = ("transformer_engine", "local")
_TE_SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


def c05_fsdp_without_graphs(point: Point) -> Answer:
    """Megatron FSDP runs without scoped CUDA graphs.

    FSDP gathers and frees parameters between kernels; a graph replays fixed addresses.

    Pass: use_megatron_fsdp=true, cuda_graph_impl="local" without scope. Fail: the same with scope full_iteration.
    Source: CloudAI MegatronBridge workload, constraint 5.
    """
    if not (point.use_megatron_fsdp and point.has_scoped_graphs):
        return None
    fact, remedy = "Megatron FSDP runs without CUDA graphs", "set cuda_graph_impl or use_megatron_fsdp off"
    return point.violation("C05", "use_megatron_fsdp", fact, remedy, *_SHOWN, "use_megatron_fsdp")


def c11_overlapped_all_to_all_without_graphs(point: Point) -> Answer:
    """Overlapped MoE all-to-all runs without CUDA graphs, whatever their scope.

    Pass: moe_a2a_overlap=true, cuda_graph_impl="none". Fail: moe_a2a_overlap=true, cuda_graph_impl="local".
    Source: CloudAI MegatronBridge workload, constraint 11.
    """
    if not (point.graph_impl and point.args.moe_a2a_overlap):
        return None
    fact = "overlapped all-to-all runs without CUDA graphs"
    remedy = "set cuda_graph_impl to none or moe_a2a_overlap off"
    return point.violation("C11", "moe_a2a_overlap", fact, remedy, *_SHOWN, "moe_a2a_overlap")


def c12_offloading_without_graphs(point: Point) -> Answer:
    """Activation offloading runs without scoped CUDA graphs.

    Offloading copies to the host on its own stream at times that a captured graph does not know.

    Pass: cuda_graph_impl="local" without scope, activation_offload_layers=2. Fail: transformer_engine with scope attn.
    Source: CloudAI MegatronBridge workload, constraint 12.
    """
    if not (point.has_scoped_graphs and point.activation_offload_layers > 0):
        return None
    fact, remedy = "offloading runs without CUDA graphs", "set cuda_graph_impl to none, or offload no layers"
    return point.violation("C12", "activation_offload_layers", fact, remedy, *_SHOWN, "activation_offload_layers")


def c13_graph_implementation_is_known(point: Point) -> Answer:
    """cuda_graph_impl is none, transformer_engine or local.

    Pass: cuda_graph_impl=" Local ". Fail: cuda_graph_impl="te".
    Source: CloudAI MegatronBridge workload, constraint 13.
    """
    if not point.graph_impl or point.graph_impl in _IMPLEMENTATIONS:
        return None
    if point.is_embedded and point.graph_impl == "full_iteration":  # the rule is lifted for it elsewhere
        fact, remedy = "this implementation came with Megatron-Core 0.18", "use local with scope full_iteration"
        return point.violation("C13", "cuda_graph_impl", fact, remedy, *_SHOWN, core=point.core)
    remedy = f"use one of none, {', '.join(_IMPLEMENTATIONS)}"
    return point.violation("C13", "cuda_graph_impl", f"{point.args.cuda_graph_impl!r} is unknown", remedy, *_SHOWN)


def c14_graph_scope_fits_the_implementation(point: Point) -> Answer:
    """Local graphs capture the full iteration or nothing by name; Transformer Engine's capture modules.

    In the embedded loop local graphs capture modules too, as in Megatron-Core.

    Pass: cuda_graph_impl="local", cuda_graph_scope="[full_iteration]". Fail: cuda_graph_impl="local", scope attn.
    Source: CloudAI MegatronBridge workload, constraint 14.
    """
    scopes = point.cuda_graph_scope
    names_modules = point.is_embedded and set(scopes) <= {*_TE_SCOPES}
    if point.graph_impl == "local" and scopes not in ((), ("full_iteration",)) and not names_modules:
        remedy = "use scope full_iteration alone, or no scope"
        return point.violation("C14", "cuda_graph_scope", "local graphs capture full_iteration only", remedy, *_SHOWN)
    if point.graph_impl == "transformer_engine" and (unknown := [s for s in scopes if s not in _TE_SCOPES]):
        fact = f"Transformer Engine graphs do not capture {', '.join(unknown)}"
        return point.violation("C14", "cuda_graph_scope", fact, f"use some of {', '.join(_TE_SCOPES)}", *_SHOWN)
    return None


def c15_moe_or_its_router(point: Point) -> Answer:
    """The scopes moe and moe_router exclude each other.

    moe captures the router too; capturing it twice replays it twice.

    Pass: scope moe. Fail: scope moe,moe_router.
    Source: CloudAI MegatronBridge workload, constraint 15; Megatron-Core TransformerConfig.
    """
    if not {"moe", "moe_router"} <= set(point.cuda_graph_scope):
        return None
    return point.violation(
        "C15", "cuda_graph_scope", "moe and moe_router exclude each other", "keep one of them", *_SHOWN
    )


def c16_preprocess_needs_the_router(point: Point) -> Answer:
    """The scope moe_preprocess needs moe_router.

    The preprocess step works on what the captured router leaves behind. Megatron-Core's own graphs capture both where
    one is named: in the embedded loop it passes.

    Pass: scope moe_router,moe_preprocess. Fail: scope moe_preprocess.
    Source: CloudAI MegatronBridge workload, constraint 16; Megatron-Core TransformerConfig.
    """
    if "moe_preprocess" not in point.cuda_graph_scope or "moe_router" in point.cuda_graph_scope:
        return None
    if point.is_embedded and point.graph_impl == "local":
        return None
    return point.violation("C16", "cuda_graph_scope", "moe_preprocess needs moe_router", "add moe_router", *_SHOWN)


def c17_no_recomputation_inside_a_graph(point: Point) -> Answer:
    """What a graph captures is not recomputed: recomputation would run outside of the graph that holds its input.

    Pass: scope moe_router, recompute_modules="moe_act". Fail: scope attn, recompute_modules="core_attn".
    Source: CloudAI MegatronBridge workload, constraint 17.
    """
    scopes, modules = set(point.cuda_graph_scope), set(point.recompute_modules)
    clashes = {
        "attn": modules & {"core_attn", "mla_up_proj"},
        "mlp": modules & {"mlp"},
        "moe": modules & {"moe_act", "moe", "shared_experts"},
        "moe_router": modules & {"moe", "shared_experts"},
    }
    clashing = sorted(module for scope, found in clashes.items() if scope in scopes for module in found)
    if "layernorm" in modules and {"attn", "mlp"} <= scopes and scopes & {"moe", "moe_router"}:
        clashing.append("layernorm")
    if not clashing:
        return None
    fact = f"{', '.join(dict.fromkeys(clashing))} would be recomputed inside a captured graph"
    remedy = "remove these modules or the scopes that hold them"
    return point.violation("C17", "recompute_modules", fact, remedy, *_SHOWN, "recompute_modules")
