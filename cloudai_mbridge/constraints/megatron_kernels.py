"""M25-M30: what Transformer Engine's kernels refuse, and layers other than attention and feed-forwards.

Each of these stops a run in its first forward or backward pass, after it got its nodes, or while the model is built.
"""

import math
from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point
from cloudai_mbridge.constraints.stack import stack_at
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.models.cmd_args import QUANTIZED
from cloudai_mbridge.recipes.apply import lacking
from cloudai_mbridge.training.compat.stack import ENGINE, Stack
from cloudai_mbridge.training.compat.versions import TRANSFORMER_ENGINE

_HOPPER = ("h100", "h200", "gh200")
_BLACKWELL = ("b200", "b300", "gb200", "gb300", "vr200", "r100")
_PRETRAIN = "pretrain"
_LAYERS_M, _LAYERS_G = "M", "G"


def _has_engine(point: Point) -> bool | None:
    """Return whether Transformer Engine's layers train, which need it and a GPU; None if unknown.

    Without it, the embedded loop has layers of its own, for any number of tokens.
    """
    if not point.is_embedded:
        return True
    if TRANSFORMER_ENGINE in lacking(point.system):
        return False
    stack = None if point.system is None else stack_at(point.system, point.args, point.variable)
    if isinstance(stack, Stack) and stack.release and ENGINE not in stack.modules:
        return False
    is_known = point.system is not None and point.system.is_this_environment
    return True if is_known or gpu_label(point.args, point.system) else None


def m25_tokens_fill_the_blocks_of_the_format(point: Point) -> Answer:
    """In FP8 and FP4, the tokens of a rank are a multiple of what the format's kernels take.

    A rank has seq_length*mb/cp tokens, of which sequence parallelism (with tp > 1) leaves it one in tp between the
    layers. Those are a multiple of 8, of 32 in MXFP8, of 16 in NVFP4; all of them, which the weights' gradients
    multiply, of 32 in NVFP4, and of 16 in blocks (fp8_sc) and on Hopper.

    Pass: compute_dtype="fp8_mx", seq_length=4096, tp=2. Fail: compute_dtype="fp8_mx", seq_length=4112, tp=2.
    Not evaluated: the sequence length or mb is unknown, or fine-tuning, whose batches may be padded to other lengths.
    Source: Transformer Engine 2.20, utils.assert_dim_for_fp8_exec, the quantizers' shapes, cublaslt_gemm; cuBLAS's
    requirements on FP4.
    """
    dtype = point.args.compute_dtype.lower()
    if dtype not in QUANTIZED:
        return None
    if (length := point.seq_length) is None or (mb := point.args.mb) is None:
        return NotEvaluated("M25", "seq_length and mb")
    if "sequence_parallel" in point.overridden:
        return NotEvaluated("M25", "sequence_parallel, which extra_cmd_args set,")
    is_split = point.tp > 1 and point.of_recipe("sequence_parallel") is not False
    if min(point.tp, point.cp, mb, length) < 1 or length * mb % (shares := point.cp * (point.tp if is_split else 1)):
        return None  # M02, M05 and M06 report it
    own, tokens = length * mb // shares, length * mb // point.cp
    between, multiplied = _unit_of_tokens(point, dtype)
    for count, what, multiple in ((own, "tokens of a rank", between), (tokens, "tokens of a layer", multiplied)):
        if count % (multiple or 16):
            if multiple is None:
                return NotEvaluated("M25", "gpu_type")
            if point.args.task != _PRETRAIN:
                return NotEvaluated("M25", "the length that batches of fine-tuning are padded to")
            fact = f"{count} {what} in {dtype} are not a multiple of {multiple}"
            remedy = _lengths(length, mb, point.cp, shares, between, multiplied or 16)
            shown = {"compute_dtype": dtype, "seq_length": length, "mb": mb, "cp": point.cp}
            return point.violation("M25", "seq_length", fact, remedy, **shown, tp=point.tp)
    return None


def _unit_of_tokens(point: Point, dtype: str) -> tuple[int, int | None]:
    """Return the units of the tokens between layers, and of all tokens of a layer; None: the GPU decides."""
    if dtype == "fp8_mx":
        return 32, 1
    if dtype == "nvfp4":
        return 16, 32
    if dtype == "fp8_sc":
        return 8, 16
    gpu = gpu_label(point.args, point.system) if point.is_embedded else point.args.gpu_type.lower()
    return 8, 16 if gpu in _HOPPER else 1 if gpu in _BLACKWELL else None


def _lengths(length: int, mb: int, cp: int, shares: int, between: int, multiplied: int) -> str:
    """Return the next sequence lengths below and above that fit."""
    unit = math.lcm(
        shares * between // math.gcd(shares * between, mb), cp * multiplied // math.gcd(cp * multiplied, mb)
    )
    unit = math.lcm(unit, shares, 2 * cp if cp > 1 else 1)
    below = length // unit * unit
    return f"use seq_length {' or '.join(str(each) for each in (below, below + unit) if each)}, a multiple of {unit}"


def m26_widths_fill_the_blocks_of_the_format(point: Point) -> Answer:
    """In FP8 and FP4, the widths of a rank's weights are multiples of 16, and of 32 in MXFP8 and NVFP4.

    Pass: compute_dtype="fp8_mx", ffn_hidden_size=14336, tp=8. Fail: compute_dtype="fp8_mx", ffn_hidden_size=2880,
    tp=8: 360. Not evaluated: no recipe.
    Source: Transformer Engine 2.20, utils.assert_dim_for_fp8_exec, the quantizers' shapes, cublaslt_gemm; Megatron-Core
    fp4_utils.get_fp4_align_size, ssm.mamba_mixer.
    """
    dtype = point.args.compute_dtype.lower()
    if dtype not in QUANTIZED:
        return None
    if point.recipe is None:
        return NotEvaluated("M26", "recipe")
    if point.of_recipe("quant_recipe") is not None:
        return NotEvaluated("M26", "the format of each layer, which quant_recipe chooses,")
    unit = 32 if dtype in ("fp8_mx", "nvfp4") else 16
    for name, width, ranks, argument in _widths(point):
        if ranks < 1 or width % ranks or not width // ranks % unit:
            continue  # a width that the ranks do not divide is M10's
        fact = f"{name} = {width}, {width // ranks} a rank, is not a multiple of {unit} in {dtype}"
        where = argument if ranks > 1 else "compute_dtype"
        remedy = f"use a smaller {argument}, or another compute_dtype" if ranks > 1 else "use another compute_dtype"
        shown = {name.replace(" ", "_"): width, **({argument: ranks} if ranks > 1 else {})}
        return point.violation("M26", where, fact, remedy, "compute_dtype", **shown)
    return None


def _widths(point: Point) -> Iterator[tuple[str, int, int, str]]:
    """Yield the widths of weights that are multiplied in the format: name, width, ranks that share it, the argument."""
    hidden = point.args.hidden_size or _size(point, "hidden_size")
    heads, kv = _size(point, "num_attention_heads"), _size(point, "kv_channels")
    if hidden:
        yield "hidden_size", hidden, 1, "tp"
    if hidden and heads and not point.of_recipe("multi_latent_attention"):
        yield "width of the heads", heads * (kv or hidden // heads), point.tp, "tp"
    ffn = _size(point, "ffn_hidden_size")
    if ffn and point.has_dense_layers and not _layers(point):
        yield "ffn_hidden_size", ffn, point.tp, "tp"
    if point.num_moe_experts:
        if own := _size(point, "moe_ffn_hidden_size") or ffn:
            yield "moe_ffn_hidden_size", own, point.expert_tp, "et"
        if shared := _size(point, "moe_shared_expert_intermediate_size"):
            yield "moe_shared_expert_intermediate_size", shared, point.tp, "tp"
    if _LAYERS_M in _layers(point) and hidden:
        heads, groups, head, state = _mamba(point, hidden)
        yield "width of Mamba's input projection", 2 * heads * head + 2 * groups * state + heads, point.tp, "tp"
        yield "width of Mamba's output projection", heads * head, point.tp, "tp"


def m27_windows_and_sinks_have_a_kernel_with_context_parallelism(point: Point) -> Answer:
    """On GPUs, windows and sinks of attention need another exchange of context parallelism than p2p, the default.

    Sliding windows need model.cp_comm_type a2a or all_gather, another softmax than vanilla a2a. The embedded loop's own
    layers, without Transformer Engine, do both with any.

    Pass: window_size=[127, 0], cp=2, cp_comm_type="a2a". Fail: the same with cp_comm_type="p2p".
    Not evaluated: the embedded loop on unknown GPUs.
    Source: Transformer Engine 2.20, attention.dot_product_attention.context_parallel.attn_forward_func_with_cp.
    """
    if point.cp <= 1:
        return None
    window, softmax = point.of_recipe("window_size"), point.of_recipe("softmax_type") or "vanilla"
    has_window = isinstance(window, list | tuple) and tuple(window) not in ((-1, 0), (-1, -1))
    if not has_window and softmax == "vanilla":
        return None
    kinds, allowed = _exchanges(point), ("a2a",) if softmax != "vanilla" else ("a2a", "all_gather")
    wrong = next((kind for kind in kinds if kind not in allowed), None)
    if wrong is None or (has_engine := _has_engine(point)) is False:
        return None
    if has_engine is None:
        return NotEvaluated("M27", "gpu_type")
    what = "windows" if softmax == "vanilla" else f"{softmax} softmax{' and windows' if has_window else ''}"
    fact = f"attention with {what} has no kernel for cp = {point.cp} with cp_comm_type {wrong}"
    remedy = f"set model.cp_comm_type = {' or '.join(map(repr, allowed))} in extra_cmd_args, or cp = 1"
    shown: dict[str, Any] = {"window_size": list(window)} if has_window else {}
    return point.violation("M27", "cp", fact, remedy, "cp", cp_comm_type=wrong, **shown, softmax_type=softmax)


def _exchanges(point: Point) -> tuple[str, ...]:
    """Return the exchanges of context parallelism: one, or one of each layer."""
    given = point.of_recipe("cp_comm_type")
    return tuple(dict.fromkeys(map(str, given))) if isinstance(given, list) else (str(given or "p2p"),)


def m28_all_to_all_splits_the_heads(point: Point) -> Answer:
    """On GPUs, the all-to-all of context parallelism (cp_comm_type a2a) splits the heads and groups of a rank evenly.

    Pass: 64 heads, 8 groups, cp_comm_type="a2a", tp=2, cp=4. Fail: the same with cp=8.
    Not evaluated: the embedded loop on unknown GPUs.
    Source: Transformer Engine 2.20, attention.dot_product_attention.context_parallel (num_heads % cp_size == 0).
    """
    heads = _size(point, "num_attention_heads")
    if point.cp <= 1 or not heads or "a2a" not in _exchanges(point):
        return None
    groups = heads if point.of_recipe("multi_latent_attention") else _size(point, "num_query_groups") or heads
    if point.tp < 1 or heads % point.tp:
        return None  # M08 reports it
    own = {"num_attention_heads": heads // point.tp, "num_query_groups": max(groups // point.tp, 1)}
    name = next((name for name, count in own.items() if count % point.cp), None)
    if name is None or (has_engine := _has_engine(point)) is False:
        return None
    if has_engine is None:
        return NotEvaluated("M28", "gpu_type")
    fact = f"{own[name]} of {name} on a tensor-parallel rank are not divisible by cp = {point.cp} with cp_comm_type a2a"
    remedy = f"use a cp that divides {math.gcd(*own.values())}, or a smaller tp"
    return point.violation("M28", "cp", fact, remedy, "cp", "tp", num_attention_heads=heads, num_query_groups=groups)


def m29_mamba_heads_and_groups_divide(point: Point) -> Answer:
    """tp divides Mamba's heads and groups, cp the heads of a rank; cp and the groups of a rank divide one another.

    Pass: 64 heads, 8 groups, tp=8, cp=4. Fail: tp=16; tp=1, cp=3; 12 groups, tp=2, cp=4. Not evaluated: no recipe.
    Source: megatron.core.ssm.mamba_mixer, megatron.core.ssm.mamba_context_parallel.
    """
    if point.recipe is None:
        return NotEvaluated("M29", "recipe")
    hidden = point.args.hidden_size or _size(point, "hidden_size")
    if _LAYERS_M not in _layers(point) or not hidden or min(point.tp, point.cp) < 1:
        return None
    heads, groups, head, _ = _mamba(point, hidden)
    tp, cp, own = point.tp, point.cp, max(groups // point.tp, 1)
    name = "mamba_num_heads"
    if min(heads, groups, head) < 1 or (not _size(point, name) and 2 * hidden % head):
        fact, where = f"heads of a width of {head} do not divide {2 * hidden}, twice the hidden size", "hidden_size"
    elif heads % groups:
        fact, where = f"{heads} heads of Mamba are not divisible by its {groups} groups", "model_recipe_name"
    elif heads % tp or groups % tp:
        what, count = ("heads", heads) if heads % tp else ("groups", groups)
        fact, where = f"{count} {what} of Mamba are not divisible by tp = {tp}", "tp"
    elif heads // tp % cp:
        fact, where = f"{heads // tp} heads of Mamba on a tensor-parallel rank are not divisible by cp = {cp}", "cp"
    elif cp > 1 and max(own, cp) % min(own, cp):
        fact, where = f"{own} groups of Mamba on a tensor-parallel rank and cp = {cp} do not divide one another", "cp"
    else:
        return None
    remedy = f"use a tp that divides {math.gcd(heads, groups)}"
    if where == "cp":
        fitting = [n for n in range(1, heads // tp + 1) if not heads // tp % n and not max(own, n) % min(own, n)]
        remedy = f"use a cp of {', '.join(map(str, fitting))}"
    elif where != "tp":
        remedy = "choose other sizes of its layers"
    return point.violation("M29", where, fact, remedy, "tp", "cp", mamba_num_heads=heads, mamba_num_groups=groups)


def _mamba(point: Point, hidden: int) -> tuple[int, int, int, int]:
    """Return heads, groups, width of a head and size of the state, with Megatron-Core's defaults."""
    head = _size(point, "mamba_head_dim") or 64
    heads = _size(point, "mamba_num_heads") or 2 * hidden // head
    return heads, _size(point, "mamba_num_groups") or 8, head, _size(point, "mamba_state_dim") or 128


def m30_delta_net_heads_divide(point: Point) -> Answer:
    """tp*cp divides the heads of Gated DeltaNet; before Megatron-Core 0.18 it runs without context parallelism.

    Pass: 16 key heads, 32 value heads, tp=4, cp=2 on Megatron-Core 0.18. Fail: tp=32; cp=2 on 0.17.
    Not evaluated: no recipe, or cp > 1 with an unknown Megatron-Core.
    Source: megatron.core.transformer.TransformerConfig (gated_delta_net).
    """
    if point.recipe is None:
        return NotEvaluated("M30", "recipe")
    has_it = point.of_recipe("experimental_attention_variant") == "gated_delta_net" or _LAYERS_G in _layers(point)
    if not has_it or min(point.tp, point.cp) < 1:
        return None
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    heads = {name: _size(point, name) or default for name, default in heads.items()}
    ranks = point.tp * point.cp
    keys, values = heads.values()
    if point.cp > 1 and point.has_core("0.18") is False:
        fact, remedy = f"Gated DeltaNet of Megatron-Core {point.core} runs with cp = 1 only", "set cp to 1"
        return point.violation("M30", "cp", fact, remedy, "cp", core=point.core)
    if values % keys:
        fact = f"{values} value heads of Gated DeltaNet are not a multiple of its {keys} key heads"
        return point.violation("M30", "model_recipe_name", fact, "choose other numbers of heads", **heads)
    if name := next((name for name, count in heads.items() if count % ranks), None):
        fact = f"{name} = {heads[name]} is not divisible by tp*cp = {ranks}"
        remedy = f"use a tp*cp that divides {math.gcd(keys, values)}"
        return point.violation("M30", "tp" if point.tp > 1 else "cp", fact, remedy, "tp", "cp", **heads)
    return NotEvaluated("M30", "the release of Megatron-Core") if point.cp > 1 and point.core is None else None


def _layers(point: Point) -> str:
    """Return the pattern of a hybrid's layers, without multi-token prediction; "" for other models."""
    pattern = point.of_recipe("hybrid_layer_pattern")
    return pattern.partition("/")[0] if isinstance(pattern, str) else ""


def _size(point: Point, field: str) -> int | None:
    value = point.of_recipe(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
