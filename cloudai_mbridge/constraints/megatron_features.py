"""M14 on: features that exclude each other, need a kind of model, or need a kind of GPU."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point

_RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
# additional modules in the cores of later releases of Megatron-Bridge
_RECOMPUTABLE_SINCE_0_5 = ("mhc", "gdn_norm_out")
_BLACKWELL = ("b200", "b300", "gb200", "gb300", "vr200", "r100")
_HOPPER = ("h100", "h200", "gh200")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_DTYPES = {
    "bf16": ("a100", *_HOPPER, *_BLACKWELL),
    "fp32": ("a100", *_HOPPER, *_BLACKWELL),
    "fp8_cs": (*_HOPPER, *_BLACKWELL),
    "fp8_ds": (*_HOPPER, *_BLACKWELL),
    "fp8_sc": (*_HOPPER, *_BLACKWELL),
    "fp8_mx": _BLACKWELL,
    "nvfp4": _BLACKWELL,
}
_OF_MODULES = ("transformer_engine", "local")  # implementations that capture modules by name


def m14_recomputed_modules_are_known(point: Point) -> Answer:
    """Every module to recompute is one that Megatron can recompute, and that the model has.

    Pass: recompute_modules="core_attn". Fail: recompute_modules="attention"; mla_up_proj without latent attention;
    moe_act without experts. Not evaluated: mla_up_proj or moe_act without a recipe.
    Source: megatron.core.transformer.TransformerConfig.
    """
    modules = point.recompute_modules
    later = set(modules) & {*_RECOMPUTABLE_SINCE_0_5}
    if later and (point.core if point.is_embedded else point.release) is None:
        return NotEvaluated("M14", f"the release of Megatron-{'Core' if point.is_embedded else 'Bridge'}")
    known = _recomputable(point)
    if unknown := [module for module in modules if module not in known]:
        fact, remedy = f"{', '.join(unknown)} cannot be recomputed", f"use some of {', '.join(known)}"
        return point.violation("M14", "recompute_modules", fact, remedy, "recompute_modules")
    if not {"mla_up_proj", "moe_act"} & set(modules):
        return None
    if point.recipe is None:
        return NotEvaluated("M14", "recipe")
    if "mla_up_proj" in modules and not point.is_latent:
        fact = "mla_up_proj needs multi-latent attention"
        return point.violation("M14", "recompute_modules", fact, "remove mla_up_proj", "recompute_modules")
    if "moe_act" in modules and not point.num_moe_experts:
        fact = "moe_act needs experts"
        return point.violation("M14", "recompute_modules", fact, "remove moe_act", "recompute_modules")
    return None


def _recomputable(point: Point) -> tuple[str, ...]:
    if point.release is not None and point.release.key >= (0, 5):
        return (*_RECOMPUTABLE, *_RECOMPUTABLE_SINCE_0_5)
    is_later = point.release is None and point.has_core("0.19")
    if is_later and point.of_recipe("experimental_attention_variant") == "gated_delta_net":
        return (*_RECOMPUTABLE, "gdn_norm_out")
    return _RECOMPUTABLE


def m15_full_or_selective_recomputation(point: Point) -> Answer:
    """Recomputation is either of whole layers or of modules.

    Megatron's full recomputation takes a number of layers and no modules, selective recomputation the opposite; so does
    model.recompute_granularity of `extra_cmd_args`.

    Pass: recompute_num_layers=1. Fail: recompute_num_layers=1, recompute_modules="mlp".
    Source: megatron.core.transformer.TransformerConfig.
    """
    layers, shown = point.args.recompute_num_layers, ("recompute_num_layers", "recompute_modules")
    if layers and point.recompute_modules:
        fact = "whole layers and modules cannot both be recomputed"
        return point.violation("M15", "recompute_modules", fact, "remove one of them", *shown)
    if not point.settings or (kind := point.recompute_granularity) is None or bool(layers) is (kind == "full"):
        return None
    fact = f"{kind} recomputation takes {'a' if kind == 'full' else 'no'} number of layers"
    remedy = f"{'set' if kind == 'full' else 'remove'} recompute_num_layers, or remove model.recompute_granularity"
    return point.violation("M15", shown[0], fact, remedy, shown[0], "recompute_granularity")


def m16_offload_or_recompute(point: Point) -> Answer:
    """Activations are offloaded or recomputed, not both.

    Pass: activation_offload_layers=2. Fail: activation_offload_layers=2, recompute_num_layers=1.
    Source: megatron.core.transformer.TransformerConfig (cpu_offloading).
    """
    if point.activation_offload_layers <= 0 or point.recompute_granularity is None:
        return None
    name, fact = "activation_offload_layers", "offloading does not work with recomputation"
    other = "recompute_modules" if point.recompute_modules else "recompute_num_layers"
    return point.violation("M16", name, fact, "remove one of them", name, other)


def m17_whole_layer_graphs_are_graphs(point: Point) -> Answer:
    """CUDA graphs without a scope capture whole layers: Megatron FSDP and offloading do not run with them either.

    C05 and C12 take an implementation without scope as off; Megatron takes it as whole-layer graphs.

    Pass: cuda_graph_impl="local". Fail: cuda_graph_impl="local" without scope, activation_offload_layers=2.
    Source: megatron.core.transformer.TransformerConfig (CUDA graphs not supported with CPU offloading).
    """
    is_whole_layer = point.graph_impl and not (point.cuda_graph_scope or point.has_full_iteration_graph)
    if not (is_whole_layer and (point.use_megatron_fsdp or point.activation_offload_layers > 0)):
        return None
    shown = ("cuda_graph_impl", "use_megatron_fsdp", "activation_offload_layers")
    fact = "graphs without a scope capture whole layers, which neither Megatron FSDP nor offloading can run with"
    return point.violation("M17", "cuda_graph_impl", fact, "set cuda_graph_impl to none", *shown)


def m18_graph_scopes_exist_in_the_model(point: Point) -> Answer:
    """Expert scopes need experts, the moe scope experts of a fixed capacity, the mlp scope a dense layer.

    A graph replays fixed shapes: without use_tokendrop, the number of an expert's tokens is another one in every step.

    Pass: scope moe_router on a mixture of experts. Fail: scope moe_router on a dense model. Not evaluated: no recipe,
    or `extra_cmd_args` set model.moe_expert_capacity_factor for the upstream launcher.
    Source: megatron.core.transformer.TransformerConfig.
    """
    scopes = set(point.cuda_graph_scope)
    of_experts = scopes & {"moe", "moe_router", "moe_preprocess"}
    if not point.graph_impl or not (of_experts or "mlp" in scopes):
        return None
    if point.recipe is None:
        return NotEvaluated("M18", "recipe")
    experts = point.num_moe_experts
    if of_experts and (experts or 0) <= 1:
        fact, remedy = "the model has no experts", "remove moe scopes"
    elif "mlp" in scopes and not point.has_dense_layers:
        fact, remedy = "the model has no dense layer", "remove mlp"
    elif "moe" not in scopes or point.graph_impl not in _OF_MODULES or point.args.use_tokendrop:
        return None
    elif point.of_recipe("moe_expert_capacity_factor") is None:
        fact, remedy = "experts take any number of tokens", "set use_tokendrop to true, or remove moe"
    else:
        return None
    return point.violation("M18", "cuda_graph_scope", fact, remedy, "cuda_graph_scope", "num_moe_experts")


def m19_overlapped_all_to_all_has_what_it_needs(point: Point) -> Answer:
    """Overlapped MoE all-to-all needs expert parallelism, virtual stages in a pipeline, and no layer recomputation.

    Since Megatron-Core 0.17 the experts may not be recomputed either. A graph of attention may hold no biases, whose
    gradients come later than the graph.

    Pass: moe_a2a_overlap=true, ep=8. Fail: moe_a2a_overlap=true, ep=1.
    Not evaluated: recompute_modules="moe" with an unknown Megatron-Core.
    Source: megatron.core.transformer.TransformerConfig (overlap_moe_expert_parallel_comm); Megatron-Bridge 0.6.0,
    megatron.bridge.training.comm_overlap (delay_wgrad_compute).
    """
    if not point.has_overlapped_all_to_all:
        return None
    needs = {
        "ep > 1": (point.args.ep or 1) > 1,
        "vp when pp > 1": point.pp <= 1 or (point.vp or 1) > 1,
        "no recompute_num_layers": not point.args.recompute_num_layers,
        "no recomputation of moe": "moe" not in point.recompute_modules or not point.has_core("0.17"),
        "16-bit training": point.args.compute_dtype != "fp32",
        "no graph of attention with biases": not _captures_biases(point),
    }
    missing = [name for name, is_there in needs.items() if not is_there]
    if not missing:
        is_open = "moe" in point.recompute_modules and point.core is None
        return NotEvaluated("M19", "the release of Megatron-Core") if is_open else None
    fact, remedy = f"overlapped all-to-all needs {', '.join(missing)}", "provide it, or set moe_a2a_overlap off"
    return point.violation("M19", "moe_a2a_overlap", fact, remedy, "ep", "pp", "vp", "compute_dtype")


def _captures_biases(point: Point) -> bool:
    """Return whether a graph captures attention whose projections have biases; releases before 0.6 do not look."""
    is_asked = point.is_embedded or (point.release is not None and point.release.key >= (0, 6))
    captures = is_asked and bool(point.graph_impl) and "attn" in point.cuda_graph_scope
    return captures and any(point.of_recipe(name) for name in ("add_bias_linear", "add_qkv_bias"))


def m20_gpu_computes_the_precision(point: Point) -> Answer:
    """The GPU type has the precision: MXFP8 and NVFP4 came with Blackwell.

    Pass: compute_dtype="fp8_mx", gpu_type="gb200". Fail: compute_dtype="fp8_mx", gpu_type="h100".
    Not evaluated: the GPU type or the precision is unknown.
    Source: NVIDIA Transformer Engine documentation, MXFP8 and NVFP4 block scaling.
    """
    dtype, gpu = point.args.compute_dtype.lower(), point.args.gpu_type.lower()
    if dtype not in _DTYPES or gpu not in _DTYPES["bf16"]:
        return NotEvaluated("M20", f"a known gpu_type and compute_dtype ({gpu!r}, {dtype!r})")
    if gpu in _DTYPES[dtype]:
        return None
    remedy = f"use one of {', '.join(_DTYPES[dtype])}, or another precision"
    return point.violation("M20", "compute_dtype", f"{gpu} has no {dtype}", remedy, compute_dtype=dtype, gpu_type=gpu)


def m21_graphs_with_whole_layers_recomputed(point: Point) -> Answer:
    """Whole layers are recomputed with CUDA graphs only if the graph is the full iteration.

    A graph of a part of a layer would be recorded again by every recomputation around it.

    Pass: recompute_num_layers=1, cuda_graph_impl="local", scope full_iteration. Fail: the same without scope.
    Source: megatron.core.transformer.TransformerConfig (full recompute is only supported with full iteration graphs).
    """
    is_full = point.cuda_graph_scope == ("full_iteration",) or point.has_full_iteration_graph
    if not (point.graph_impl and point.args.recompute_num_layers) or is_full:
        return None
    name = "recompute_num_layers"
    fact = "layers are recomputed with CUDA graphs of another scope than full_iteration"
    remedy = "use scope full_iteration with cuda_graph_impl = 'local', or remove one of them"
    return point.violation("M21", name, fact, remedy, name, "cuda_graph_impl", "cuda_graph_scope")


def m22_local_graphs_are_of_the_full_iteration(point: Point) -> Answer:
    """Since Megatron-Bridge 0.6, local CUDA graphs capture the full iteration only.

    C14 lets `local` without a scope through; these releases refuse it.

    Pass: cuda_graph_impl="local", scope full_iteration. Fail: cuda_graph_impl="local" without scope.
    Not evaluated: the release of Megatron-Bridge is unknown.
    Source: Megatron-Bridge 0.6.0, megatron.bridge.utils.cuda_graph.
    """
    if point.is_embedded or point.graph_impl != "local" or point.has_full_iteration_graph:
        return None
    if point.release is None:
        return NotEvaluated("M22", "the release of Megatron-Bridge")
    if point.release.key < (0, 6):
        return None
    fact, shown = "local graphs need scope full_iteration", ("cuda_graph_impl", "cuda_graph_scope")
    remedy = "set cuda_graph_scope to full_iteration, or cuda_graph_impl to transformer_engine or none"
    return point.violation("M22", "cuda_graph_impl", fact, remedy, *shown, release=point.release.version)


def m23_full_iteration_graphs_have_no_modules(point: Point) -> Answer:
    """A graph of the full iteration captures no modules by name: since Megatron-Core 0.18 it is an implementation.

    Older releases of Megatron-Core lack the implementation, which is C13. For the upstream launcher it passes: that is
    sent scope full_iteration alone, with a note.

    Pass: cuda_graph_impl="full_iteration". Fail: cuda_graph_impl="full_iteration", cuda_graph_scope="attn".
    Source: megatron.core.transformer.TransformerConfig (cuda_graph_modules must be empty).
    """
    scopes = ",".join(scope for scope in point.cuda_graph_scope if scope != "full_iteration")
    is_lacking = point.has_core("0.18") is False
    if not point.is_embedded or point.graph_impl != "full_iteration" or not scopes or is_lacking:
        return None
    where, fact = "cuda_graph_scope", "a full-iteration graph captures no modules by name"
    operands = {"cuda_graph_scope": scopes, "core": point.core}
    return point.violation("M23", where, fact, f"remove {where}", "cuda_graph_impl", **operands)


def m24_fsdp_has_several_connections(point: Point) -> Answer:
    """Megatron FSDP runs with more than one hardware queue: CUDA_DEVICE_MAX_CONNECTIONS is not 1.

    In a single queue, kernels would wait for the all-gathers that they are to overlap with.

    Pass: use_megatron_fsdp=true, CUDA_DEVICE_MAX_CONNECTIONS=8 or unset. Fail: the same with 1.
    Source: Megatron-Bridge 0.6.0, megatron.bridge.training.config; Megatron-LM, megatron.training.arguments.
    """
    given = point.variable(_CONNECTIONS)
    if given is None or str(given) != "1" or not point.use_megatron_fsdp:
        return None
    fact, where = "Megatron FSDP does not start with a single hardware queue", "use_megatron_fsdp"
    remedy = f"remove {_CONNECTIONS} from global_env_vars and extra_env_vars: recipes set it themselves"
    return point.violation("M24", where, fact, remedy, where, **{_CONNECTIONS: "1"})
