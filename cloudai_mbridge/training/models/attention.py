"""Core attention and norm for Megatron's local layer spec, used without Transformer Engine."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from cloudai_mbridge.training.data.packed_batch import zigzag_index


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention on torch's scaled_dot_product_attention.

    Megatron's own local core attention keeps the full score matrix and refuses context parallelism. Here K and V are
    gathered over the context-parallel group (their gradients are reduce-scattered) and masked by position in Megatron's
    zig-zag layout. `cp_comm_type` is therefore ignored.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp = pg_collection.cp if hasattr(pg_collection, "cp") else parallel_state.get_context_parallel_group()
        self.window: int | None = None  # how many tokens back a query sees; None: all of them
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = int(config.window_size[0]) if config.window_size[0] >= 0 else None
        # gpt-oss: a logit of no key, zero or learned by head, takes its share of every softmax
        self.kind = getattr(config, "softmax_type", "vanilla")
        if self.kind == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.softmax_offset.partition_dim, self.softmax_offset.partition_stride = 0, 1  # type: ignore[attr-defined]
        self._masks: dict[int, torch.Tensor] = {}
        self.notes_logits = any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))
        self.current_max_attn_logits: torch.Tensor | None = None  # by head, since they were last read

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend: query [s, b, heads, d], key and value [s, b, kv heads, d] -> [s, b, heads * d].

        attention_mask: [b, 1, s, s * cp], True if a query sees no key, in the order of the sequence; None: causal.
        A window takes its place, as in Megatron-Core.
        Packed sequences come without the batch dimension, and leave without it.
        """
        if attention_bias is not None:
            raise ValueError("attention bias needs Transformer Engine")
        if packed_seq_params is not None:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        if self.cp.size() > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), True, group=self.cp)
            value = gather_from_sequence_parallel_region(value.contiguous(), True, group=self.cp)
        mask: torch.Tensor | None = None
        if packed_seq_params is not None:
            mask = self._mask(packed_seq_params.cu_seqlens_q)
        elif attention_mask is not None and self.window is None:
            mask = ~self._in_gathered_order(attention_mask)
        elif self.cp.size() > 1 or self.window is not None:
            length = query.size(0)
            if length not in self._masks:
                self._masks[length] = self._mask(torch.tensor([0, length * self.cp.size()], device=query.device))
            mask = self._masks[length]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if self.training and self.notes_logits:
            self._note_logits(q, k, mask)
        dropout = self.dropout if self.training else 0.0
        # other tensor-parallel ranks have other heads and draw differently; a sequence-parallel block sees to it itself
        draws_apart = bool(dropout) and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws_apart else nullcontext():
            if self.kind != "vanilla":
                q, k, v, mask = self._with_sink(q, k, v, mask)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
                dropout_p=dropout,
            )
        out = out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
        return out if packed_seq_params is None else out.squeeze(1)

    def _with_sink(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put a key before the others whose value is zero and whose logit is the sink's, in the form of a mask."""
        if mask is None:
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        mask = mask.expand(mask.size(0) if mask.dim() == 4 else 1, 1, -1, -1)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
        offset = self.softmax_offset.to(q.dtype) if self.kind == "learnable" else q.new_zeros(q.size(1))
        sink = offset[None, :, None, None].expand(mask.size(0), -1, q.size(2), 1)
        bias = torch.cat([sink, bias.expand(-1, q.size(1), -1, -1)], -1)
        k, v = (torch.cat([each.new_zeros(each[:, :, :1].shape), each], 2) for each in (k, v))
        return q, k, v, bias

    @torch.no_grad()
    def _note_logits(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Keep the largest logit of each head. q [b, heads, s, d], k [b, kv heads, s, d]; mask None: causal."""
        scale = q.size(-1) ** -0.5 if self.scale is None else self.scale
        scores = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2) * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if mask is None else mask
        found = scores.masked_fill(~seen, float("-inf")).float().amax((0, 2, 3))
        before = self.current_max_attn_logits
        self.current_max_attn_logits = found if before is None else torch.maximum(before, found)

    def _in_gathered_order(self, mask: torch.Tensor) -> torch.Tensor:
        """Put the keys of a mask, its last dimension, in the order in which context parallelism gathers them."""
        if (size := self.cp.size()) == 1:
            return mask
        bounds = torch.tensor([0, mask.size(-1)])
        order = torch.cat([zigzag_index(bounds, size, rank) for rank in range(size)])
        return mask.index_select(-1, order.to(mask.device))

    def _mask(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return a mask, True if a local query may see a gathered key: in its own sequence, and not after it."""
        size = self.cp.size()
        if size > 1:
            shares = [zigzag_index(bounds, size, rank).to(bounds.device) for rank in range(size)]
        else:  # nothing is shared, and lengths may be odd
            shares = [torch.arange(int(bounds[-1]), device=bounds.device)]
        query, key = shares[self.cp.rank()][:, None], torch.cat(shares)[None, :]
        ends = bounds[1:].contiguous()
        is_own = torch.bucketize(query, ends, right=True) == torch.bucketize(key, ends, right=True)
        is_seen: torch.Tensor = is_own & (key <= query)
        return is_seen if self.window is None else is_seen & (query - key <= self.window)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the learned sinks, if any; each tensor-parallel rank holds the sinks of its own heads."""
        if self.kind != "learnable":
            return {}
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return sharded


class TorchNorm:
    """torch's LayerNorm or RMSNorm with Megatron's sequence-parallel tag.

    Megatron's wrapper refuses sequence parallelism; with the tag, `finalize_model_grads` sums these weights' gradients
    over the tensor-parallel group.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
