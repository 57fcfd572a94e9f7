"""Model requirements of expert-parallel overlap and delayed weight gradients. A broken rule is an AssertionError."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.utils import is_torch_min_version

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.transformer_engine import describe_te, te_is_at_least

EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"
DELAYED_WGRAD = "delay_wgrad_compute"

Rule = tuple[bool, str]
"""Whether it holds, and the message if not."""


def require(subject: str, rules: Iterable[Rule]) -> None:
    """Raise AssertionError for the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise AssertionError(f"{subject} requires {message}")


def expert_overlap_rules(model: Any) -> Iterator[Rule]:
    """Yield the conditions for overlapping the experts' all-to-all with another micro-batch's products."""
    experts, ep = model.num_moe_experts, model.expert_model_parallel_size
    yield ep > 1, f"expert_model_parallel_size > 1, not {ep}"
    yield experts is not None and experts > 1, f"num_moe_experts > 1, not {experts}"
    dispatcher = model.moe_token_dispatcher_type
    yield dispatcher in ("alltoall", "flex"), f'moe_token_dispatcher_type "alltoall" or "flex", not "{dispatcher}"'
    yield model.bf16 or model.fp16, "bf16 or fp16"
    # Earlier releases hang
    yield is_torch_min_version("2.6.0"), f"torch >= 2.6.0; {torch.__version__} is installed"
    virtual = model.virtual_pipeline_model_parallel_size
    yield (
        model.pipeline_model_parallel_size == 1 or virtual is not None,
        f"virtual_pipeline_model_parallel_size with pipeline_model_parallel_size {model.pipeline_model_parallel_size}",
    )
    yield model.recompute_granularity != "full", 'recompute_granularity other than "full"'
    yield model.recompute_method is None, f'recompute_method None, not "{model.recompute_method}"'
    yield model.recompute_num_layers is None, f"recompute_num_layers None, not {model.recompute_num_layers}"
    yield not model.moe_shared_expert_overlap, "moe_shared_expert_overlap off"
    yield model.mtp_num_layers in (None, 0, 1), f"mtp_num_layers None, 0 or 1, not {model.mtp_num_layers}"


def delayed_wgrad_rules(model: Any, expert_overlap: bool, grad_reduce_overlap: bool) -> Iterator[Rule]:
    """Yield the conditions for computing weight gradients apart from input gradients. The flags are settled values."""
    yield expert_overlap, f"{EXPERT_OVERLAP} in comm_overlap"
    te_27 = te_is_at_least("2.7.0")
    for name, is_on in (
        ("overlap_grad_reduce", grad_reduce_overlap),
        ("gradient_accumulation_fusion", model.gradient_accumulation_fusion),
    ):
        yield te_27 or not is_on, f"Transformer Engine >= 2.7.0 together with {name}; {describe_te()}"
    scopes = cuda_graphs.captured(model)
    has_attention = "attn" in scopes
    if not has_attention and not ("moe_router" in scopes and _graphs_shared_expert(model)):
        return
    yield te_is_at_least("2.12.0"), f"Transformer Engine >= 2.12.0 inside a CUDA graph; {describe_te()}"
    # Without it gradients are accumulated at changing addresses, which a graph cannot replay
    yield model.gradient_accumulation_fusion, "gradient_accumulation_fusion inside a CUDA graph"
    for name in ("add_bias_linear", "add_qkv_bias"):
        yield not (has_attention and getattr(model, name)), f"{name} off with attention in a CUDA graph"


def _graphs_shared_expert(model: Any) -> bool:
    """Return whether a graph of the router holds the shared expert: it does unless that runs on its own stream."""
    has_one = getattr(model, "moe_shared_expert_intermediate_size", None) is not None
    return has_one and not getattr(model, "moe_shared_expert_overlap", False)
