"""The sections of a training config, under Megatron-Core's field names. Standard library only.

Sizes are per model or per sequence, never per rank; a rank's share follows from the parallel sizes.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, parallel layout and precision of a GPT model."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    make_vocab_size_divisible_by: int = 128
    gated_linear_unit: bool = True
    activation: Literal["silu", "gelu"] = "silu"
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    add_bias_linear: bool = False
    qk_layernorm: bool = False
    rotary_base: int = 10000
    share_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    # mixture of experts
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_aux_loss_coeff: float = 0.0
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"  # noqa: S105
    # multi-latent attention
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    # parallel layout
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: str | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    # precision and memory
    dtype: Literal["fp32", "bf16"] = "bf16"
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds an equal, aligned share."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How much to train: iterations, and sequences per micro-batch and per step."""

    train_iters: int
    micro_batch_size: int
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay."""

    lr: float
    min_lr: float = 0.0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning-rate law; iterations, not samples."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Gradient reduction over the data-parallel group."""

    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Megatron-Core's mock GPT data, drawn with `random_seed`."""

    random_seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class RNGConfig:
    """Seed of every weight and every dropout mask."""

    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class DistributedInitConfig:
    """Process group; backend None picks NCCL where there is a GPU, else gloo. The backend decides the device."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    distributed_timeout_minutes: int = 10


@dataclass(frozen=True, kw_only=True)
class ConfigContainer:
    """Everything one training run is configured with."""

    model: ModelConfig
    train: TrainingConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
