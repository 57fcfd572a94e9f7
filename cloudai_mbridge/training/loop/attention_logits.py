"""The largest attention logits of a step: logged, and bounded by scaling the query and key weights (MuonClip)."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.process.device import largest


def max_attention_logit(model: list[Any], config: Any) -> float | None:
    """Return the largest logit since the last call, None unless `qk_clip` or `log_max_attention_logit` is set.

    With `qk_clip`, heads whose logit exceeds `qk_clip_threshold` get smaller query and key weights. A collective over
    all ranks then. config: the model's. Megatron-Core's own `clip_qk` finds the layers of a half-precision model only.
    """
    if not (config.qk_clip or config.log_max_attention_logit):
        return None
    found = 0.0
    with torch.no_grad():
        for attention in _attentions(model):
            core = attention.core_attention
            if core.current_max_attn_logits is None:
                continue
            replicas = mpu.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(core.current_max_attn_logits, op=dist.ReduceOp.MAX, group=replicas)
            found = max(found, float(core.current_max_attn_logits.max()))
            if config.qk_clip:
                attention.clip_qk()
            core.current_max_attn_logits = None
    return largest(found)[0]


def _attentions(model: list[Any]) -> Iterator[Any]:
    """Yield the self-attentions of the decoder that count their logits."""
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        for layer in chunk.decoder.layers:
            if hasattr(getattr(layer.self_attention, "core_attention", None), "current_max_attn_logits"):
                yield layer.self_attention
