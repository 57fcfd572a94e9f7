"""Layers that are Transformer Engine's own, each as a whole: `model.use_transformer_engine_full_layer_spec`.

Such a layer has a norm with a bias, attention without groups or rotation, and a GELU between two products with biases;
of another model Megatron-Bridge would build this one, without a word. Names in a checkpoint are Megatron-Bridge's.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

FIELD = "use_transformer_engine_full_layer_spec"
# A parameter of such a layer -> its name in a layer of Megatron-Core, and the dimension that tensor parallelism splits
PARAMETERS = {
    "self_attention.layernorm_qkv.weight": ("self_attention.linear_qkv.weight", 0),
    "self_attention.layernorm_qkv.bias": ("self_attention.linear_qkv.bias", 0),
    "self_attention.proj.weight": ("self_attention.linear_proj.weight", 1),
    "layernorm_mlp.fc1_weight": ("mlp.linear_fc1.weight", 0),
    "layernorm_mlp.fc1_bias": ("mlp.linear_fc1.bias", 0),
    "layernorm_mlp.fc2_weight": ("mlp.linear_fc2.weight", 1),
}
INNER = "transformer_layer"
# Arguments of the layer that are fields of the model: under the same name, and as `tp_comm_...`
_SAME = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "layernorm_epsilon"),
    *("hidden_dropout", "attention_dropout", "init_method", "output_layer_init_method", "sequence_parallel"),
    "apply_residual_connection_post_layernorm",
)
_USER_BUFFERS = ("bulk_wgrad", "bulk_dgrad", "overlap_ag", "overlap_rs", "overlap_rs_dgrad")
# The models that the layer is one of
_FIELDS: dict[str, tuple[Any, ...]] = {
    "num_moe_experts": (None,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "position_embedding_type": ("learned_absolute",),
    "normalization": ("LayerNorm",),
    "qk_layernorm": (False,),
    "activation_func": (torch.nn.functional.gelu,),
    "gated_linear_unit": (False,),
    "add_bias_linear": (True,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "attention_output_gate": (False,),
    "apply_query_key_layer_scaling": (False,),
    "fp32_residual_connection": (False,),
    "recompute_granularity": (None, "full"),
    "cuda_graph_impl": ("none",),
    "fine_grained_activation_offloading": (False,),
    "delay_wgrad_compute": (False,),
    "use_transformer_engine_op_fuser": (False,),
    "init_model_with_meta_device": (False,),
}


def unlike(model: Any) -> Iterator[str]:
    """Yield a message for each field of the model that these layers do not support."""
    groups = {"num_query_groups": (None, model.num_attention_heads)}
    for name, values in (_FIELDS | groups).items():
        value = getattr(model, name, values[0])
        if value not in values:
            shown = [getattr(each, "__name__", repr(each)) for each in (value, *values)]
            yield f"model.{name} = {shown[0]} with {FIELD} = True (use {' or '.join(shown[1:])})"


def block_spec(config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage."""
    from megatron.core.extensions.transformer_engine import TENorm

    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=_layer())] * count, layer_norm=TENorm)


@cache
def _layer() -> type:
    from megatron.core.extensions.transformer_engine import _get_extra_te_kwargs
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from transformer_engine.pytorch import TransformerLayer

    class EngineLayer(MegatronModule, BaseTransformerLayer):  # type: ignore[misc]
        """One layer, in the form that Megatron-Core's block calls."""

        def __init__(
            self, config: Any, layer_number: int = 1, pg_collection: Any = None, vp_stage: int | None = None, **_: Any
        ) -> None:
            super().__init__(config=config)
            groups = pg_collection
            self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
            self.is_first_microbatch = True  # again in each step, by Megatron-Core
            tp = groups.tp.size()
            self.transformer_layer = TransformerLayer(
                **{name: getattr(config, name) for name in _SAME},
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
                zero_centered_gamma=config.layernorm_zero_centered_gamma,
                **{f"ub_{name}": getattr(config, f"tp_comm_{name}") for name in _USER_BUFFERS},
                ub_tp_comm_overlap=config.tp_comm_overlap,
                **_get_extra_te_kwargs(config),
                layer_number=self.layer_number,
                get_rng_state_tracker=get_cuda_rng_tracker,
                tp_group=groups.tp if tp > 1 else None,
                tp_size=tp,
                set_parallel_mode=tp > 1,
            )
            if groups.cp.size() > 1:
                ranks = torch.distributed.get_process_group_ranks(groups.cp)
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self.transformer_layer.set_context_parallel_group(groups.cp, ranks, stream)

        def forward(
            self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
        ) -> tuple[torch.Tensor, None]:
            """Compute [sequence, batch, hidden] of the same shape; the second value has no meaning here."""
            if others.get("packed_seq_params") is not None:
                raise ValueError(f"packed sequences with model.{FIELD} = True: use unpacked ones, or False")
            is_first, self.is_first_microbatch = self.is_first_microbatch, False
            half = self.config.bf16 or self.config.fp16
            dtype = torch.bfloat16 if self.config.bf16 else torch.float16
            with torch.autocast(device_type="cuda", dtype=dtype) if half else nullcontext():
                hidden_states = self.transformer_layer(
                    hidden_states, attention_mask=attention_mask, is_first_microbatch=is_first
                )
            return hidden_states, None

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            """Return this rank's parts of the layer in a checkpoint."""
            dimensions = {f"{INNER}.{name}": dimension for name, (_, dimension) in PARAMETERS.items()}
            state = self.state_dict(prefix="", keep_vars=True)
            made: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, dimensions, sharded_offsets)
            return made

    return EngineLayer
