"""The layout of an estimate, from a point's arguments and the settings of upstream's performance recipes."""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.layout import MASTER_WEIGHTS, Granularity, ParallelLayout, Recompute, adapters_of
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, Launcher, ResolvedCmdArgs, names_in
from cloudai_mbridge.recipes.apply import trained_layout, virtual_stages
from cloudai_mbridge.recipes.arguments import OPTIMIZERS
from cloudai_mbridge.recipes.load import Recipe, adapters_of_task

_FULLY_CAPTURED = ("full", "full_iteration", "local")
_DISPATCHING_ONCE = ("deepep", "hybridep")


def layout_of(
    args: ResolvedCmdArgs, recipe: Recipe, *, gpu: str | None = None, mtp_num_layers: int = 0
) -> ParallelLayout:
    """Return the layout of a point on GPUs: its own settings, or defaults of the upstream recipe or the embedded loop.

    gpu: its name in the hardware table; None takes `args.gpu_type`.
    BadInput: sizes that do not fit together, or an unknown number format.
    """
    if args.compute_dtype not in list(Precision):
        known = ", ".join(Precision)
        raise BadInput(f"cmd_args.compute_dtype: {args.compute_dtype!r} is unknown; use one of {known}")
    precision = Precision(args.compute_dtype)
    gpu = gpu or args.gpu_type.lower()
    given: dict[str, Any] = {"grad_reduce_in_fp32": False, **_weights(precision, gpu)}
    if args.launcher is Launcher.EMBEDDED:
        given |= _of_loop(recipe, precision)
    else:
        given |= {"use_distributed_optimizer": True, "fp32_logits": False}
        if recipe.chosen:  # with the settings of the preset
            given["optimizer_bytes"] = _optimizer_bytes(recipe)
        given |= preset(recipe.name, gpu, precision, is_fsdp=bool(args.use_megatron_fsdp))
    pp, vp, text = _pipeline(args, recipe, mtp_num_layers)
    cuda_graph = _cuda_graph(args)
    recompute = _recompute(args, given.pop("recompute_modules", frozenset()), given.pop("recompute_num_layers", None))
    if args.activation_offload_layers is not None:
        given["activation_offload_layers"] = args.activation_offload_layers
    if args.use_megatron_fsdp is not None:  # upstream, false leaves a recipe that shards as it is
        given["use_megatron_fsdp"] = args.use_megatron_fsdp or given.get("use_megatron_fsdp", False)
    instances = recipe.default("ddp", "num_distributed_optimizer_instances") if args.use_megatron_fsdp else None
    trains_adapters = args.task in ADAPTER_TASKS  # the recipe's; upstream's launcher has the same recipe
    return ParallelLayout(
        num_gpus=args.num_gpus,
        tp=args.tp or 1,
        pp=pp,
        cp=args.cp or 1,
        vp=vp,
        ep=args.ep or 1,
        etp=expert_tp(args, recipe),
        mbs=args.mb or recipe.default("train", "micro_batch_size") or 1,
        gbs=args.gb or recipe.default("train", "global_batch_size"),
        seq_length=args.seq_length,
        pipeline_layout=text,
        recompute=recompute,
        precision=precision,
        cuda_graph=cuda_graph,
        captures_router=cuda_graph == "attention" and "moe_router" in _scopes(args),
        overlap_moe_expert_parallel_comm=bool(args.moe_a2a_overlap),
        dispatches_once=_dispatches_once(args, recipe),
        adapters=adapters_of(recipe.sections.get("peft") or adapters_of_task(recipe)) if trains_adapters else None,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances or instances or 1,
        outer_dp_sharding_strategy=recipe.default("ddp", "outer_dp_sharding_strategy") or "no_shard",
        **given,
    )


def _of_loop(recipe: Recipe, precision: Precision) -> dict[str, Any]:
    """Return the embedded loop's settings of optimizer and weights."""
    is_split = bool(recipe.default("optimizer", "use_distributed_optimizer")) or _has_muon(recipe)
    has_own_state = is_split and precision is not Precision.FP8_DS
    given: dict[str, Any] = {
        "use_distributed_optimizer": is_split,
        "optimizer_bytes": _optimizer_bytes(recipe) if has_own_state else MASTER_WEIGHTS,
    }
    if recipe.default("model", "cross_entropy_loss_fusion") is not False:
        # Transformer Engine's loss keeps them as they are, Megatron-Core's own fused and plain ones in 32 bits
        given["fp32_logits"] = recipe.default("model", "cross_entropy_fusion_impl") not in (None, "te")
    name = "fp4_param_gather" if precision is Precision.NVFP4 else "fp8_param_gather"
    if (gathers := recipe.default("mixed_precision", name)) is not None:
        given["fp8_param_gather"] = gathers
    return given


def expert_tp(args: ResolvedCmdArgs, recipe: Recipe) -> int | None:
    """Return the set value, or 1 for all recipes with experts upstream, and with ep > 1 in our loop; None means tp."""
    has_experts = recipe.default("model", "num_moe_experts") is not None
    is_one = args.launcher is not Launcher.EMBEDDED or (args.ep or 1) > 1
    return 1 if args.et is None and has_experts and is_one else args.et


def _optimizer_bytes(recipe: Recipe) -> int:
    """Return the bytes per weight in addition to bf16 weights: a 32-bit copy, and two moments in the recipe's types.

    Muon has one moment, in 32 bits, of the matrices: nearly all weights.
    Megatron-Core keeps the copy also with `use_precision_aware_optimizer`, as the number format's recipe leaves
    `optimizer.fp8_recipe` at "tensorwise". Seen on an H200.
    """
    if _has_muon(recipe):
        return MASTER_WEIGHTS - 4
    moments = (recipe.default("optimizer", name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    return MASTER_WEIGHTS - 2 * sum(moment is not None for moment in moments)


def _has_muon(recipe: Recipe) -> bool:
    """Return whether the recipe's preset trains with distributed Muon, whose state is split without that of Adam."""
    return bool(recipe.default("optimizer", "optimizer") == OPTIMIZERS["muon"])


def _weights(precision: Precision, gpu: str) -> dict[str, bool]:
    """Return the storage of the weights: the same for both launchers, whose number formats are the same.

    NVFP4 since Megatron-Core 0.17; `training.dry` has Transformer Engine's quantizers make such weights.
    """
    gathered = (Precision.FP8_CS, Precision.FP8_DS, Precision.FP8_MX, Precision.NVFP4)
    return {"fp8_param_gather": precision in gathered, "has_fp8_transposes": gpu in ("h100", "h200", "gh200")}


def _pipeline(args: ResolvedCmdArgs, recipe: Recipe, mtp_num_layers: int) -> tuple[int, int, str | None]:
    """Return stages, virtual stages and the explicit layout, if any; it determines the virtual stages."""
    pp, given = args.pp or 1, args.pipeline_model_parallel_layout
    vp = args.vp or (virtual_stages(given, pp) if given else None)
    if given and args.launcher is not Launcher.EMBEDDED:
        return pp, vp or 1, given
    layers = args.num_layers or recipe.default("model", "num_layers")
    return pp, vp or 1, trained_layout(recipe, given, pp, vp, layers, mtp_num_layers) if given or pp > 1 else None


def _recompute(args: ResolvedCmdArgs, modules: frozenset[str], num_layers: int | None) -> Recompute:
    """Return the recomputation: the point's own settings replace the recipe's."""
    if args.recompute_num_layers is not None or args.recompute_modules is not None:
        modules, num_layers = frozenset(names_in(args.recompute_modules)), args.recompute_num_layers
    if num_layers:
        return Recompute(Granularity.FULL, method="block", num_layers=num_layers)
    return Recompute(Granularity.SELECTIVE, modules) if modules else Recompute()


def _cuda_graph(args: ResolvedCmdArgs) -> str:
    if not args.cuda_graph_impl or args.cuda_graph_impl == "none":
        return "none"
    is_full = any(name in _FULLY_CAPTURED for name in (args.cuda_graph_impl, *_scopes(args)))
    return "full" if is_full else "attention"


def _scopes(args: ResolvedCmdArgs) -> list[str]:
    return names_in(args.cuda_graph_scope) if args.cuda_graph_scope else []


def _dispatches_once(args: ResolvedCmdArgs, recipe: Recipe) -> bool:
    """Return whether the experts' dispatcher is a flexible one: the point's, else the recipe's with its preset."""
    backend = args.moe_flex_dispatcher_backend or recipe.default("model", "moe_flex_dispatcher_backend")
    return backend in _DISPATCHING_ONCE


_CS, _MX, _BF16, _NVFP4 = Precision.FP8_CS, Precision.FP8_MX, Precision.BF16, Precision.NVFP4


def _again(*modules: str) -> dict[str, Any]:
    return {"recompute_modules": frozenset(modules)}


def _offload(layers: int) -> dict[str, Any]:
    return {"activation_offload_layers": layers}


# its offloading of tensors above 500 MB is meant for, and affects, the inputs of the experts' activation functions
_ULTRA = {"use_megatron_fsdp": True, "offload_modules": frozenset({"moe_act"})}

# Recipe -> GPUs and number formats, () for all of them, and what is set for these
_Settings = Mapping[str, tuple[tuple[tuple[str, ...], tuple[Precision, ...], dict[str, Any]], ...]]
_SETTINGS: _Settings = {
    "deepseek_v3": (
        ((), (), _again("mla_up_proj")),
        (("h100", "b200"), (), _again("mla_up_proj", "mlp")),
        (("gb300",), (_BF16,), _again("moe_act")),
    ),
    "deepseek_v4_flash": (((), (), _again("moe_act")),),
    "kimi_k2": (((), (), _again("mla_up_proj")), (("h100",), (), _again("mla_up_proj", "mlp"))),
    "gpt_oss_120b": ((("h100", "b200", "gb200"), (), _again("layernorm", "moe_act")),),
    "nemotron_3_nano": (
        (("h100",), (_BF16,), _again("moe", "layernorm")),
        (("h100",), (_CS,), _again("moe", "layernorm", "core_attn", "moe_act")),
    ),
    "nemotron_3_super": (
        (("gb200",), (_BF16, _MX), _again("moe_act", "layernorm", "core_attn", "moe")),
        (("b200",), (_BF16, _MX), _again("moe_act", "layernorm", "core_attn")),
    ),
    "nemotron_3_ultra": (((), (), {**_again("moe_act"), **_ULTRA}),),
    "llama3_8b": ((("h100",), (_CS,), {"recompute_num_layers": 5}),),
}
# Of points with Megatron-FSDP
_FSDP_SETTINGS: _Settings = {
    "llama3_70b": (
        (("gb300",), (_BF16,), _offload(30)),
        (("gb300",), (_CS,), _offload(20)),
        (("gb200",), (_BF16,), _offload(20)),
        (("gb200",), (_CS,), _offload(40)),
        (("b200",), (_CS,), _offload(5)),
    ),
    "llama31_405b": (
        (("gb300",), (_BF16,), _offload(40)),
        (("gb300",), (_CS,), _offload(10)),
        (("gb200",), (_CS,), _offload(92)),
    ),
}


def preset(recipe: str, gpu: str, precision: Precision, *, is_fsdp: bool) -> dict[str, Any]:
    """Return the upstream recipe's settings for a GPU and format: names as in `ParallelLayout`, and recompute_*."""
    found: dict[str, Any] = {}
    for gpus, formats, settings in (*_SETTINGS.get(recipe, ()), *(_FSDP_SETTINGS.get(recipe, ()) if is_fsdp else ())):
        if gpu in (gpus or [gpu]) and precision in (formats or [precision]):
            found |= settings
    return found
