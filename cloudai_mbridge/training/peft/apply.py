"""Freeze a model, and give it adapters: before it is in half precision, and before it is wrapped."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from cloudai_mbridge.training.config.text.summary import print_rank_0, warn_rank_0
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.peft import matching
from cloudai_mbridge.training.peft.adapter import Adapter, AdapterShape, SharedAdapter
from cloudai_mbridge.training.peft.base_layer import BaseLayer, describe
from cloudai_mbridge.training.peft.canonical import split_linear
from cloudai_mbridge.training.peft.config import AdapterConfig, CanonicalLoRA, DoRA
from cloudai_mbridge.training.peft.dora import DecomposedAdapter, DecomposedLinear
from cloudai_mbridge.training.peft.linear import AdaptedLinear
from cloudai_mbridge.training.process.device import current_device


def apply(chunks: list[Any], peft: AdapterConfig, seed: int) -> None:
    """Freeze the chunks, which hold the weights to adapt, and give them adapters. A collective.

    Raises ConfigError: a target is not a linear layer, nothing is adapted, or a size does not fit the layout.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
    adapted, error = [], ""
    try:
        for chunk in chunks:
            for match in matching.find(chunk, peft):
                _adapt(match, peft, seed)
                adapted.append(match.name)
    except ValueError as reason:
        error = str(reason)
    _agree(peft, adapted, error)
    for chunk in chunks:
        _let_recomputed_layers_learn(chunk)
    _report(chunks)


def _adapt(match: matching.MatchedModule, peft: AdapterConfig, seed: int) -> None:
    module = match.module
    base = describe(module, match.name, is_expert=match.is_expert)
    shape = _shape(match, peft, base, module.config, seed)
    if isinstance(peft, DoRA) and (base.is_expert or isinstance(module, TopKRouter)):
        raise ValueError(f"peft = DoRA: {match.name} belongs to routed experts, which DoRA does not adapt; use LoRA")
    if isinstance(module, TopKRouter):
        module.adapter = Adapter(base, shape)
        module.gating = partial(_gate, module.gating, module.adapter)
    else:
        setattr(match.parent, match.attribute, _adapted(match, module, base, shape, peft))


def _gate(gating: Any, adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = gating(x)
    added: torch.Tensor = adapter(x)
    return logits + added.to(logits.dtype)


def _adapted(
    match: matching.MatchedModule, module: Any, base: BaseLayer, shape: AdapterShape, peft: AdapterConfig
) -> torch.nn.Module:
    if base.num_experts and getattr(peft, "share_expert_adapters", True):
        return AdaptedLinear(module, SharedAdapter(base, shape, is_gated=base.is_gated))
    is_fused = match.attribute == "linear_qkv" or (base.is_gated and not base.num_experts)
    if isinstance(peft, CanonicalLoRA) and match.parts and is_fused:
        return split_linear(module, match.name, base, shape, match.parts)
    if isinstance(peft, DoRA):
        return DecomposedLinear(module, DecomposedAdapter(base, shape, is_gated=base.is_gated))
    return AdaptedLinear(module, Adapter(base, shape, is_gated=base.is_gated))


def _shape(match: matching.MatchedModule, peft: AdapterConfig, base: BaseLayer, config: Any, seed: int) -> AdapterShape:
    return AdapterShape(
        name=match.name,
        dim=_rank(match, peft, base, config),
        alpha=peft.alpha,
        dropout=peft.dropout,
        is_dropped_first=peft.dropout_position == "pre",
        init_in=peft.lora_A_init_method,
        init_out=peft.lora_B_init_method,
        exchanges=getattr(peft, "a2a_experimental", False),
        regathers=getattr(peft, "sequence_parallel_input_regather", False),
        dtype=config.params_dtype,
        device=torch.device("cpu") if config.use_cpu_initialization else current_device(),
        seed=seed,
    )


def _rank(match: matching.MatchedModule, peft: AdapterConfig, base: BaseLayer, config: Any) -> int:
    """Return the rank of the product; for experts it may be a part, rounded up to a multiple the layout can split."""
    dim, ranks = peft.dim, base.ranks if base.kind == "column" else 1
    if match.is_expert and getattr(peft, "normalize_moe_lora", False):
        if dim % config.moe_router_topk:
            raise ValueError(f"peft.dim = {dim} is not a multiple of model.moe_router_topk = {config.moe_router_topk}")
        return -(-(dim // int(config.moe_router_topk)) // ranks) * ranks
    if dim % ranks:
        raise ValueError(f"peft.dim = {dim} cannot be split over {ranks} tensor-parallel ranks ({match.name})")
    return dim


def _agree(peft: AdapterConfig, adapted: list[str], error: str) -> None:
    """Let all ranks fail if one does; warn of targets that no rank has."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (adapted, error))
    if errors := [text for _, text in everyone if text]:
        raise ConfigError(errors[0])
    names = [name for found, _ in everyone for name in found]
    if not names:
        raise ConfigError(f"peft.target_modules = {peft.target_modules}: the model has no such layer")
    if not all(found for found, _ in everyone):  # Megatron-Core would save no number of steps
        raise ConfigError(
            f"peft.target_modules = {peft.target_modules}: a pipeline stage has no adapters; "
            "adapt a layer of every stage, or use fewer stages"
        )
    if missing := matching.unmatched(peft, names):
        warn_rank_0(f"peft.target_modules: the model has no {', '.join(missing)}")


def _let_recomputed_layers_learn(chunk: Any) -> None:
    """Let gradients reach adapters in recomputed layers whose inputs need no gradient.

    torch runs the backward pass of such a layer only if one of its inputs needs a gradient.
    """
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and chunk.config.recompute_granularity is not None:
        embedding.register_forward_hook(_require_grad)


def _require_grad(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _report(chunks: list[Any]) -> None:
    """Print how many parameters rank 0 trains."""
    counts = [(each.numel(), each.requires_grad) for chunk in chunks for each in chunk.parameters()]
    trained, total = sum(size for size, is_trained in counts if is_trained), sum(size for size, _ in counts)
    print_rank_0(f"  adapters: {trained:,} of {total:,} parameters of this rank are trained ({trained / total:.2%})")
