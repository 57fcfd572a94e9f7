"""C05, C11-C17: scopes that CUDA graphs can capture, and incompatible settings."""

from cloudai_mbridge.constraints.rule import Answer, Point

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
