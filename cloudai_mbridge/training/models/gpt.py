"""Build Megatron-Core's GPTModel from a ModelConfig."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import DistributedDataParallelConfig as MegatronDDPConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from cloudai_mbridge.training.config import ConfigContainer, ModelConfig
from cloudai_mbridge.training.device import current_device
from cloudai_mbridge.training.models.initialization import initialize_weights
from cloudai_mbridge.training.models.layer_specs import decoder_block_spec
from cloudai_mbridge.training.utils.flops import moe_layer_pattern

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


# Fields that Megatron-Core has under the same name
_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "qk_layernorm", "init_method_std"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "context_parallel_size", "sequence_parallel"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
)
_SAME_EXPERTS = (
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_aux_loss_coeff", "moe_token_dispatcher_type"),
)
_SAME_LATENT = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "rotary_base",
)
# They need CUDA extensions, Triton or Transformer Engine, or go through torch.compile
_NO_FUSIONS = dict(
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    apply_rope_fusion=False,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    cross_entropy_loss_fusion=False,
    persist_layer_norm=False,
)


def transformer_config(model: ModelConfig) -> TransformerConfig:
    """Translate to Megatron-Core."""
    fields: dict[str, Any] = {name: getattr(model, name) for name in _SAME}
    if model.num_moe_experts is not None:
        fields |= {name: getattr(model, name) for name in _SAME_EXPERTS}
        fields["moe_layer_freq"] = moe_layer_pattern(model)
    fields |= _device_fields(model)
    fields |= {"activation_func": _ACTIVATIONS[model.activation], "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if not model.multi_latent_attention:
        return TransformerConfig(**fields)
    return MLATransformerConfig(**fields, **{name: getattr(model, name) for name in _SAME_LATENT}, rope_type="rope")


def _device_fields(model: ModelConfig) -> dict[str, Any]:
    """Return precision, fusions, and what the device asks of the pipeline's messages."""
    dtype, on_cpu = _DTYPES[model.dtype], current_device().type == "cpu"
    interleaved = model.virtual_pipeline_model_parallel_size is not None
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # With virtual stages Megatron-LM demands overlapped P2P: without it, two stages train wrongly and say nothing
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # gloo reads a send buffer after isend has returned, so freeing it early would corrupt what is sent
        deallocate_pipeline_outputs=not on_cpu,
        use_cpu_initialization=on_cpu,
        **_NO_FUSIONS,
    )


def build_model(config: ConfigContainer) -> list[DistributedDataParallel]:
    """Build this rank's chunks (one per virtual stage), wrapped for data parallelism."""
    megatron_config = transformer_config(config.model)
    ddp = MegatronDDPConfig(
        grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=config.ddp.overlap_grad_reduce,
        overlap_param_gather=config.ddp.overlap_param_gather,
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    stages = range(config.model.virtual_pipeline_model_parallel_size or 1)
    single = len(stages) == 1
    chunks = [_build_chunk(config, megatron_config, None if single else stage) for stage in stages]
    return [
        DistributedDataParallel(megatron_config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


def _build_chunk(config: ConfigContainer, megatron_config: TransformerConfig, vp_stage: int | None) -> Any:
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=decoder_block_spec(megatron_config, vp_stage),
        vocab_size=config.model.padded_vocab_size,
        max_sequence_length=config.model.seq_length,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=config.model.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=config.model.rotary_base,
        vp_stage=vp_stage,
    )
    model.to(current_device())
    initialize_weights(model, megatron_config, config.rng.seed)
    return Float16Module(megatron_config, model) if megatron_config.bf16 else model
