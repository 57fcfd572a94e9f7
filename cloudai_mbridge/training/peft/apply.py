"""Freeze a model, and give it adapters: before it is in half precision, and before it is wrapped. Merge them again."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from cloudai_mbridge.training.config.text.summary import print_rank_0, warn_rank_0
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import CheckpointError, ConfigError
from cloudai_mbridge.training.peft.adapter import Adapter, SharedAdapter
from cloudai_mbridge.training.peft.config import AdapterConfig, CanonicalLoRA, DoRA
from cloudai_mbridge.training.peft.layers import BaseLayer, describe, find, unmatched, weights
from cloudai_mbridge.training.peft.linear import AdaptedLinear, DecomposedLinear, split_linear


def apply(chunks: list[Any], peft: AdapterConfig, seed: int) -> None:
    """Freeze the chunks, which hold the weights to adapt, and give them adapters. A collective.

    Raises ConfigError: a target is not a linear layer, nothing is adapted, or a size does not fit the layout.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
    adapted: list[str] = []
    error = ""
    try:
        for chunk in chunks:
            adapted += adapt(chunk, peft, seed)
    except ValueError as reason:
        error = str(reason)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (adapted, error))  # all ranks fail if one does
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
    if missing := unmatched(peft, names):
        warn_rank_0(f"peft.target_modules: the model has no {', '.join(missing)}")
    for chunk in chunks:
        # torch runs the backward pass of a recomputed layer only if one of its inputs needs a gradient
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None and chunk.config.recompute_granularity is not None:
            embedding.register_forward_hook(_require_grad)
    counts = [(each.numel(), each.requires_grad) for chunk in chunks for each in chunk.parameters()]
    trained, total = sum(size for size, is_trained in counts if is_trained), sum(size for size, _ in counts)
    print_rank_0(f"  adapters: {trained:,} of {total:,} parameters of this rank are trained ({trained / total:.2%})")


def _require_grad(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapt(chunk: Any, peft: AdapterConfig, seed: int) -> list[str]:
    """Give the modules of a chunk adapters; return their names. Raises ValueError: one cannot have any."""
    names = []
    for parent, attribute, name, parts in find(chunk, peft):
        module = getattr(parent, attribute)
        base = describe(module, name)
        arguments = (base, peft, _rank(peft, base), seed)
        is_router = isinstance(module, TopKRouter)
        is_fused = attribute == "linear_qkv" or (base.is_gated and not base.num_experts)
        if isinstance(peft, DoRA) and (base.is_expert or is_router):
            raise ValueError(f"peft = DoRA: {name} belongs to routed experts, which DoRA does not adapt; use LoRA")
        if is_router:
            module.adapter = Adapter(*arguments)
            module.gating = partial(_gate, module.gating, module.adapter)
        elif base.num_experts and getattr(peft, "share_expert_adapters", True):
            setattr(parent, attribute, AdaptedLinear(module, SharedAdapter(*arguments)))
        elif isinstance(peft, CanonicalLoRA) and parts and is_fused:
            setattr(parent, attribute, split_linear(module, *arguments, parts))
        elif isinstance(peft, DoRA):
            setattr(parent, attribute, DecomposedLinear(module, Adapter(*arguments)))
        else:
            setattr(parent, attribute, AdaptedLinear(module, Adapter(*arguments)))
        names.append(name)
    return names


def _gate(gating: Any, adapter: Adapter, x: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = gating(x)
    added: torch.Tensor = adapter(x)
    return logits + added.to(logits.dtype)


def _rank(peft: AdapterConfig, base: BaseLayer) -> int:
    """Return the rank of the product; for experts it may be a part, rounded up to a multiple the layout can split."""
    dim, ranks = peft.dim, base.ranks if base.kind == "column" else 1
    if base.is_expert and getattr(peft, "normalize_moe_lora", False):
        topk = int(base.config.moe_router_topk)
        if dim % topk:
            raise ValueError(f"peft.dim = {dim} is not a multiple of model.moe_router_topk = {topk}")
        return -(-(dim // topk) // ranks) * ranks
    if dim % ranks:
        raise ValueError(f"peft.dim = {dim} cannot be split over {ranks} tensor-parallel ranks ({base.name})")
    return dim


@torch.no_grad()
def merge(chunk: Any) -> None:
    """Replace adapted layers by layers with merged weights, in a chunk or its wrapper. A collective."""
    for name, module in list(chunk.named_modules()):
        if isinstance(module, AdaptedLinear):
            for weight, merged in zip(weights(module.to_wrap), module.merged(), strict=True):
                weight.copy_(merged.to(weight.dtype))
            if hasattr(module.to_wrap, "return_layernorm_output"):
                module.to_wrap.return_layernorm_output = False
            parent, _, attribute = name.rpartition(".")
            setattr(chunk.get_submodule(parent), attribute, module.to_wrap)
        elif isinstance(module, TopKRouter) and hasattr(module, "adapter"):
            (product,) = module.adapter.products()
            module.weight.copy_((module.weight.float() + product.float()).to(module.weight.dtype))
            del module.adapter, module.gating


_DECIDING = ("target_modules", "exclude_modules", "dim", "alpha")


def is_trained(key: str) -> bool:
    """Return whether an entry of the model changes while adapters are trained: theirs, and the experts' balance."""
    return ".adapter." in key or key.endswith(".router.expert_bias")


def check_adapters(directory: str, peft: AdapterConfig) -> None:
    """Check that a checkpoint contains the same adapters. Raises CheckpointError: they differ."""
    try:
        data = read_yaml(Path(directory) / "run_config.yaml")
    except (ConfigError, OSError):
        return  # of another program: the tensors are compared in any case
    saved: dict[str, Any] = (data or {}).get("peft") or {}
    if not saved:
        raise CheckpointError(f"{directory}: is a checkpoint without adapters; use it as pretrained_checkpoint")
    kind = str(saved.get("_target_", "")).rpartition(".")[2]
    there = {"kind": kind, **{name: saved.get(name) for name in _DECIDING}}
    here = {"kind": type(peft).__name__, **{name: getattr(peft, name) for name in _DECIDING}}
    if differing := [name for name in here if there[name] != here[name]]:
        name = differing[0]
        raise CheckpointError(f"{directory}: its adapters have {name} {there[name]!r}, this run's peft {here[name]!r}")
