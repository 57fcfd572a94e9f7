"""Every configuration class has Megatron-Bridge's fields: name, type, default, and how they are given.

The tables are written down here, not read from the classes; `Opt[...]` is Optional, `U[...]` Union, and no default
means that the field is required.
"""

import inspect
import logging
import re
import signal
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers import MegatronTokenizerBase

    from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
    from cloudai_mbridge.training.config.dataset import (
        DataloaderConfig,
        DatasetBuildContext,
        DatasetProvider,
        GPTDatasetConfig,
        MockGPTDatasetConfig,
    )
    from cloudai_mbridge.training.config.ddp import DistributedDataParallelConfig
    from cloudai_mbridge.training.config.dist import DistributedInitConfig
    from cloudai_mbridge.training.config.finetuning import (
        FinetuningDatasetConfig,
        GPTFIMDatasetConfig,
        PackedSequenceSpecs,
    )
    from cloudai_mbridge.training.config.logger import LoggerConfig
    from cloudai_mbridge.training.config.optimizer import (
        OptimizerConfig,
        OptimizerConfigOverrideProvider,
        OptimizerConfigOverrideProviderContext,
    )
    from cloudai_mbridge.training.config.profiling import ProfilingConfig, TensorInspectConfig
    from cloudai_mbridge.training.config.rerun import RerunStateMachineConfig
    from cloudai_mbridge.training.config.resilience import (
        FaultToleranceConfig,
        InProcessRestartConfig,
        NVRxStragglerDetectionConfig,
        StragglerDetectionConfig,
    )
    from cloudai_mbridge.training.config.rng import RNGConfig
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig
    from cloudai_mbridge.training.config.train import TrainingConfig, ValidationConfig
    from cloudai_mbridge.training.tokenizers.config import TokenizerConfig

_NAMES: dict[str, Any] = {
    "Any": Any,
    "Callable": typing.Callable,
    "Literal": Literal,
    "MegatronTokenizerBase": MegatronTokenizerBase,
    "Opt": Optional,
    "PackedSequenceSpecs": PackedSequenceSpecs,
    "Path": Path,
    "ProcessGroupCollection": ProcessGroupCollection,
    "SchedulerConfig": SchedulerConfig,
    "U": Union,
    "logging": logging,
    "signal": signal,
    "torch": torch,
}

_LOADER = """
dataloader_type: Opt[Literal['single', 'cyclic', 'batch', 'external']] = None
num_workers: int = 2
data_sharding: bool = True
pin_memory: bool = True
drop_last: bool = True
persistent_workers: bool = True
trust_remote_code: Opt[bool] = None
"""

KEYWORD_ONLY: dict[type, str] = {
    RNGConfig: """
seed: int = 1234
te_rng_tracker: bool = False
inference_rng_tracker: bool = False
data_parallel_random_init: bool = False
""",
    ProfilingConfig: """
use_nsys_profiler: bool = False
profile_step_start: int = 10
profile_step_end: int = 12
use_pytorch_profiler: bool = False
pytorch_profiler_collect_shapes: bool = False
pytorch_profiler_collect_callstack: bool = False
pytorch_profiler_collect_chakra: bool = False
profile_ranks: list[int] = []
record_memory_history: bool = False
memory_snapshot_path: str = 'snapshot.pickle'
record_shapes: bool = False
nvtx_ranges: bool = False
""",
    TensorInspectConfig: """
enabled: bool = False
features: U[dict[str, Any], str, Path, None] = None
feature_dirs: Opt[list[str]] = None
allow_custom_feature_dirs: bool = False
log_dir: Opt[str] = None
init_training_step: int = 0
""",
    DistributedInitConfig: """
distributed_backend: Literal['nccl', 'gloo'] = 'nccl'
distributed_timeout_minutes: int = 10
align_grad_reduce: bool = True
local_rank: int = 0
lazy_mpu_init: bool = False
use_megatron_fsdp: bool = False
use_torch_fsdp2: bool = False
nccl_communicator_config_path: Opt[str] = None
use_tp_pp_dp_mapping: bool = False
use_gloo_process_groups: bool = True
use_sharp: bool = False
sharp_enabled_group: Opt[Literal['dp', 'dp_replica']] = None
high_priority_stream_groups: Opt[list[str]] = []
distributed_timeout_seconds_after_init: Opt[int] = None
flight_recorder_dump_path: Opt[str] = None
flight_recorder_trace_buffer_size: int = 2000
flight_recorder_dump_on_timeout: bool = True
flight_recorder_include_stack_trace: bool = False
flight_recorder_include_only_active: bool = True
flight_recorder_extra_dump_on_exec: bool = True
disable_jit_fuser: bool = False
external_gpu_device_mapping: bool = False
enable_megatron_core_experimental: bool = False
eval_context_parallel_size: Opt[int] = None
use_decentralized_pg: bool = False
""",
    RerunStateMachineConfig: """
error_injection_rate: int = 0
error_injection_type: Literal['correct_result', 'transient_error', 'persistent_error'] = 'transient_error'
rerun_mode: Literal['disabled', 'validate_results', 'report_determinism_stats'] = 'disabled'
check_for_nan_in_loss: bool = True
check_for_spiky_loss: bool = False
spiky_loss_factor: float = 10.0
""",
    StragglerDetectionConfig: """
log_straggler: bool = False
straggler_ctrlr_port: int = 65535
straggler_minmax_count: int = 1
disable_straggler_on_startup: bool = False
enable_straggler_on_startup: bool = True
""",
    TrainingConfig: """
micro_batch_size: Opt[int] = None
global_batch_size: Opt[int] = None
rampup_batch_size: Opt[list[int]] = None
step_batch_size_schedule: Opt[str] = None
decrease_batch_size_if_needed: bool = False
empty_unused_memory_level: Literal[0, 1, 2] = 0
check_weight_hash_across_dp_replicas_interval: Opt[int] = None
gpu_sniff_test_interval: Opt[int] = None
train_sync_interval: Opt[int] = None
train_iters: Opt[int] = None
train_samples: Opt[int] = None
num_epochs: Opt[float] = None
exit_interval: Opt[int] = None
exit_duration_in_mins: Opt[int] = None
exit_signal_handler: bool = False
exit_signal: signal.Signals = signal.SIGTERM
exit_signal_handler_for_dataloader: bool = False
exit_signal_handler_for_training: bool = False
manual_gc: bool = False
manual_gc_interval: int = 0
manual_gc_eval: bool = True
iterations_to_skip: list[int] = []
check_optimizer_step_success: bool = True
skip_sync_grad_norm_across_mp: bool = False
eval_iters: Opt[int] = None
eval_interval: Opt[int] = None
skip_train: Opt[bool] = None
""",
    ValidationConfig: """
eval_iters: Opt[int] = 100
eval_interval: Opt[int] = None
start_eval_at_iter: Opt[int] = None
eval_global_batch_size: Opt[int] = None
eval_micro_batch_size: Opt[int] = None
skip_train: bool = False
test_mode: bool = False
full_validation: bool = False
multiple_validation_sets: bool = False
validation_set_names: Opt[list[str]] = None
""",
    SchedulerConfig: """
lr_decay_style: Literal['constant', 'linear', 'cosine', 'inverse-square-root', 'WSD'] = 'linear'
lr_wsd_decay_style: Literal['exponential', 'linear', 'cosine', 'minus_sqrt'] = 'exponential'
max_steps: Opt[int] = None
lr_decay_iters: Opt[int] = None
lr_decay_samples: Opt[int] = None
lr_wsd_decay_iters: Opt[int] = None
lr_wsd_decay_samples: Opt[int] = None
lr_warmup_fraction: Opt[float] = None
lr_warmup_iters: int = 0
lr_warmup_samples: int = 0
lr_warmup_init: float = 0.0
lr_decay_steps: Opt[int] = None [init=False]
lr_warmup_steps: Opt[int] = None [init=False]
override_opt_param_scheduler: bool = False
use_checkpoint_opt_param_scheduler: bool = False
start_weight_decay: Opt[float] = None
end_weight_decay: Opt[float] = None
weight_decay_incr_style: Literal['constant', 'linear', 'cosine'] = 'constant'
no_weight_decay_cond_type: Opt[Literal['qwen3_next']] = None
wd_incr_steps: Opt[int] = None [init=False]
wsd_decay_steps: Opt[int] = None [init=False]
""",
    LoggerConfig: """
log_interval: int = 100
log_params_norm: bool = False
log_throughput: bool = False
log_throughput_to_tensorboard: bool = False
throughput_window_size: int = 100
log_progress: bool = False
timing_log_level: Literal[-1, 0, 1, 2] = 0
timing_log_option: Literal['max', 'minmax', 'all'] = 'minmax'
tensorboard_dir: Opt[str] = None
tensorboard_log_interval: int = 1
tensorboard_queue_size: int = 1000
log_timers_to_tensorboard: bool = False
log_loss_scale_to_tensorboard: bool = True
log_validation_ppl_to_tensorboard: bool = False
log_memory_to_tensorboard: bool = False
memory_keys: Opt[dict[str, str]] = None
log_memory_interval: Opt[int] = None
log_device_memory_used: bool = False
log_l2_norm_grad_to_tensorboard: bool = False
log_num_zeros_in_grad: bool = False
log_max_attention_logit: bool = False
log_runtime_to_tensorboard: bool = False
runtime_time_unit: str = 'hours'
barrier_with_L1_time: bool = True
log_world_size_to_tensorboard: bool = False
wandb_project: Opt[str] = None
wandb_exp_name: Opt[str] = None
wandb_save_dir: Opt[str] = None
wandb_entity: Opt[str] = None
logging_level: int = 20
filter_warnings: bool = True
modules_to_filter: Opt[list[str]] = None
set_level_for_all_loggers: bool = False
log_energy: bool = False
save_config_filepath: Opt[str] = None
skip_train_metrics_log: bool = False
mlflow_experiment: Opt[str] = None
mlflow_run_name: Opt[str] = None
mlflow_tracking_uri: Opt[str] = None
mlflow_tags: Opt[dict[str, str]] = None
mlflow_description: Opt[str] = None
mlflow_log_artifacts: bool = True
comet_project: Opt[str] = None
comet_experiment_name: Opt[str] = None
comet_workspace: Opt[str] = None
comet_api_key: Opt[str] = None
comet_tags: Opt[list[str]] = None
moe_routing_trace_path: Opt[str] = None
moe_routing_trace_max_training_iters: Opt[int] = None
moe_routing_trace_capture_logits: bool = False
moe_routing_trace_capture_hidden_states: bool = False
moe_routing_trace_dump_weights: bool = False
""",
    CheckpointConfig: """
save: Opt[str] = None
save_interval: Opt[int] = None
save_wgrads_interval: Opt[int] = None
save_dgrads_interval: Opt[int] = None
save_params_interval: Opt[int] = None
save_activations_interval: Opt[int] = None
save_tokens_per_expert_interval: Opt[int] = None
save_retain_interval: Opt[int] = None
most_recent_k: Opt[int] = -1
save_optim: bool = True
save_rng: bool = True
load: Opt[str] = None
load_optim: bool = True
load_main_params_from_ckpt: bool = False
load_rng: bool = True
non_persistent_save_interval: Opt[int] = None
non_persistent_ckpt_type: Opt[Literal['global', 'local', 'in_memory']] = None
non_persistent_global_ckpt_dir: Opt[str] = None
non_persistent_local_ckpt_dir: Opt[str] = None
non_persistent_local_ckpt_algo: Literal['fully_parallel', 'atomic'] = 'fully_parallel'
finetune: bool = False
pretrained_checkpoint: Opt[str] = None
ckpt_step: Opt[int] = None
use_checkpoint_args: bool = False
use_mp_args_from_checkpoint_args: bool = False
use_tokenizer_model_from_checkpoint_args: bool = True
exit_on_missing_checkpoint: bool = False
ckpt_format: Literal['torch', 'torch_dist', 'torch_dcp', 'fsdp_dtensor'] = 'torch_dist'
auto_detect_ckpt_format: bool = False
ckpt_convert_format: Opt[Literal['torch', 'torch_dist']] = None
ckpt_convert_save: Opt[str] = None
ckpt_convert_update_legacy_dist_opt_format: bool = False
fully_parallel_save: bool = True
async_save: bool = False
async_strategy: str = 'nvrx'
use_persistent_ckpt_worker: bool = True
async_ckpt_cpu_priority: int = 10
async_ckpt_io_priority: Opt[int] = 3
async_ckpt_use_cpu_shm: bool = False
fully_parallel_load: bool = False
ckpt_fully_parallel_load_exchange_algo: Literal['broadcast', 'gather_rounds', 'gather_object'] = 'broadcast'
ckpt_fully_parallel_save_process_group: Literal['dp', 'ep_dp'] = 'dp'
ckpt_fully_parallel_load_process_group: Literal['dp', 'ep_dp'] = 'dp'
ckpt_assume_constant_structure: bool = False
ckpt_load_validate_sharding_integrity: bool = True
verify_integrity: bool = False
stream_ckpt_dequant: bool = True
strict_fsdp_dtensor_load: bool = False
dist_ckpt_strictness: Literal['assume_ok_unexpected', 'log_unexpected', 'log_all', 'raise_unexpected', 'raise_all', \
'return_unexpected', 'return_all', 'ignore_all'] = 'assume_ok_unexpected'
dist_ckpt_save_pre_mcore_014: bool = False
dist_ckpt_optim_fully_reshardable: bool = False
distrib_optim_fully_reshardable_mem_efficient: bool = False
save_tokenizer_assets: bool = True
replication: bool = False
replication_jump: Opt[int] = None
replication_factor: int = 2
storage_writers_per_rank: int = 1
dist_ckpt_workers: int = 1
also_save_hf_checkpoint: bool = False
hf_source_path: Opt[str] = None
hf_trust_remote_code: bool = False
hf_distributed_save: bool = False
hf_save_every_n_ranks: int = 1
async_write_results_mp_mode: str = 'fork'
custom_manager_class: Opt[str] = None
""",
    DataloaderConfig: _LOADER,
    DatasetProvider: _LOADER,
    FinetuningDatasetConfig: _LOADER.replace("= None\nnum", "= 'batch'\nnum")
    + """
dataset_root: U[str, Path, None] = None
seq_length: int
seed: int = 1234
memmap_workers: int = 1
max_train_samples: Opt[int] = None
packed_sequence_specs: Opt[PackedSequenceSpecs] = None
dataset_kwargs: Opt[dict[str, Any]] = None
do_validation: bool = True
do_test: bool = True
""",
}

POSITIONAL: dict[type, str] = {
    FaultToleranceConfig: """
enable_ft_package: bool = False
calc_ft_timeouts: bool = False
simulate_fault: bool = False
simulated_fault_type: Literal['rank_hung', 'rank_killed', 'random'] = 'random'
simulated_fault_rank: Opt[int] = None
simulated_fault_base_delay: int = 0
""",
    NVRxStragglerDetectionConfig: """
enabled: bool = False
report_time_interval: float = 300.0
calc_relative_gpu_perf: bool = True
calc_individual_gpu_perf: bool = True
num_gpu_perf_scores_to_print: int = 5
gpu_relative_perf_threshold: float = 0.7
gpu_individual_perf_threshold: float = 0.7
stop_if_detected: bool = False
enable_logging: bool = True
profiling_interval: int = 1
logger_name: str = 'megatron.bridge.NVRxStragglerDetection'
""",
    InProcessRestartConfig: """
enabled: bool = False
max_iterations: Opt[int] = None
monitor_thread_interval: float = 1.0
monitor_process_interval: float = 1.0
progress_watchdog_interval: float = 1.0
heartbeat_interval: float = 30.0
soft_timeout: float = 60.0
hard_timeout: float = 90.0
heartbeat_timeout: float = 60.0
barrier_timeout: float = 120.0
completion_timeout: float = 120.0
last_call_wait: float = 1.0
termination_grace_time: float = 1.0
granularity: Literal['node', 'rank'] = 'node'
active_world_size: Opt[int] = None
empty_cuda_cache: bool = True
max_rank_faults: Opt[int] = None
monitor_process_logdir: Opt[str] = None
""",
    DatasetBuildContext: """
train_samples: int
valid_samples: int
test_samples: int
tokenizer: Opt[MegatronTokenizerBase] = None
pg_collection: Opt[ProcessGroupCollection] = None
""",
    OptimizerConfigOverrideProvider: "",
    # where a path or a name may be missing, the type says so (Megatron-Bridge writes `str = None`)
    PackedSequenceSpecs: """
packed_sequence_size: int = -1
tokenizer_model_name: Opt[str] = None
num_tokenizer_workers: int = -1
packed_train_data_path: Opt[str] = None
packed_val_data_path: Opt[str] = None
packed_metadata_path: Opt[str] = None
pad_cu_seqlens: bool = False
pad_seq_to_mult: Opt[int] = 1
max_single_sequence_length: Opt[int] = None
""",
    TokenizerConfig: """
metadata_path: U[str, dict[str, Any], None] = None
vocab_size: Opt[int] = None
vocab_file: Opt[str] = None
merge_file: Opt[str] = None
vocab_extra_ids: int = 0
tokenizer_type: Opt[Literal['BertWordPieceLowerCase', 'BertWordPieceCase', 'GPT2BPETokenizer', \
'SentencePieceTokenizer', 'GPTSentencePieceTokenizer', 'HuggingFaceTokenizer', 'Llama2Tokenizer', 'TikTokenizer', \
'MultimodalTokenizer', 'NullMultimodalTokenizer', 'NullTokenizer', 'SFTTokenizer']] = None
tokenizer_model: U[str, Path, None] = None
special_tokens: Opt[list[str]] = None
chat_template: Opt[str] = None
tiktoken_pattern: Opt[str] = None
tiktoken_num_special_tokens: int = 1000
tiktoken_special_tokens: Opt[list[str]] = None
tokenizer_prompt_format: Opt[str] = None
image_tag_type: Opt[str] = None
force_system_message: Opt[bool] = False
hf_tokenizer_kwargs: Opt[dict[str, Any]] = {}
sp_tokenizer_kwargs: Opt[dict[str, Any]] = {}
use_tokenizer_vocab_size: bool = False
tokenizer_hf_no_use_fast: bool = False
tokenizer_hf_no_include_special_tokens: bool = False
trust_remote_code: bool = False
tokenizer_sentencepiece_legacy: bool = False
tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
null_tokenizer_eod_id: Opt[int] = None
null_tokenizer_pad_id: int = -1
chat_template_path: Opt[str] = None
""",
}

_GPT = """
random_seed: int
sequence_length: int
blend: Opt[tuple[list[str], Opt[list[float]]]] = None
blend_per_split: Opt[list[Opt[tuple[list[str], Opt[list[float]]]]]] = None
multiple_validation_sets: Opt[bool] = None
full_validation: Opt[bool] = None
split: Opt[str] = None
split_matrix: Opt[list[tuple[float, float]]] = None [init=False]
num_dataset_builder_threads: int = 1
path_to_cache: Opt[str] = None
mmap_bin_files: bool = True
mock: bool = False [init=False]
tokenizer: Opt[MegatronTokenizerBase] = None
mid_level_dataset_surplus: float = 0.005
allow_ambiguous_pad_tokens: Opt[bool] = False
fast_cache_load: bool = False
defer_npy_index_mmap: bool = False
reset_position_ids: Opt[bool] = None
reset_attention_mask: Opt[bool] = None
eod_mask_loss: Opt[bool] = None
create_attention_mask: bool = True
drop_last_partial_validation_sequence: bool = True
add_extra_token_to_sequence: bool = True
object_storage_cache_path: Opt[str] = None
data_parallel_size: int = 1
sequence_parallel_size: int = 0
hybrid_context_parallel: bool = False
sequences_per_dataset: Opt[dict[str, int]] = None
token_dtype_code: Opt[int] = None [init=False]
context_parallel_size: Opt[int] = None
data_path: U[str, list[str], None] = None
skip_getting_attention_mask_from_dataset: bool = True
"""

ON_MEGATRON_CORE: dict[type, str] = {
    DistributedDataParallelConfig: """
grad_reduce_in_fp32: bool = False
overlap_grad_reduce: bool = False
overlap_param_gather: bool = False
align_param_gather: bool = False
use_distributed_optimizer: bool = False
num_distributed_optimizer_instances: int = 1
check_for_nan_in_grad: bool = False
check_for_large_grads: bool = False
bucket_size: Opt[int] = None
pad_buckets_for_high_nccl_busbw: bool = False
reduce_scatter_with_fp32_accumulation: bool = False
param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
average_in_collective: bool = False
fp8_param_gather: bool = False
reuse_grad_buf_for_mxfp8_param_ag: bool = False
use_megatron_fsdp: bool = False
use_custom_fsdp: bool = False
data_parallel_sharding_strategy: str = 'no_shard'
gradient_reduce_div_fusion: bool = True
suggested_communication_unit_size: int = None
keep_fp8_transpose_cache: bool = False
nccl_ub: bool = False
fsdp_double_buffer: bool = False
fsdp_db_use_persist_buf_on_alloc_fail: bool = False
fsdp_all_gather_in_start_param_sync: bool = True
outer_dp_sharding_strategy: str = 'no_shard'
disable_symmetric_registration: bool = False
fsdp_manual_registration: bool = False
delay_wgrad_compute: bool = False
megatron_fsdp_main_params_dtype: Opt[torch.dtype] = torch.float32
megatron_fsdp_main_grads_dtype: Opt[torch.dtype] = None
megatron_fsdp_grad_comm_dtype: Opt[torch.dtype] = None
megatron_fsdp_use_decoupled_grad: bool = False
""",
    OptimizerConfig: """
lr: Opt[float] = None
min_lr: Opt[float] = None
decoupled_lr: Opt[float] = None
decoupled_min_lr: Opt[float] = None
weight_decay: float = 0.01
apply_wd_to_qk_layernorm: bool = False
fp8_recipe: Opt[str] = None
fp16: bool = False
bf16: bool = False
reuse_grad_buf_for_mxfp8_param_ag: bool = False
params_dtype: torch.dtype = torch.float32
use_precision_aware_optimizer: bool = False
store_param_remainders: bool = True
main_grads_dtype: torch.dtype = torch.float32
main_params_dtype: torch.dtype = torch.float32
exp_avg_dtype: torch.dtype = torch.float32
exp_avg_sq_dtype: torch.dtype = torch.float32
optimizer: str = 'adam'
loss_scale: Opt[float] = None
initial_loss_scale: float = 2 ** 32
min_loss_scale: float = 1.0
loss_scale_window: float = 1000
hysteresis: int = 2
adam_beta1: float = 0.9
adam_beta2: float = 0.999
adam_eps: float = 1e-08
decoupled_weight_decay: bool = True
sgd_momentum: float = 0.9
muon_momentum: float = 0.95
muon_split_qkv: bool = True
muon_nesterov: bool = False
muon_scale_mode: str = 'spectral'
muon_fp32_matmul_prec: str = 'medium'
muon_coefficient_type: str = 'quintic'
muon_num_ns_steps: int = 5
muon_tp_mode: str = 'blockwise'
muon_extra_scale_factor: float = 1.0
muon_scalar_optimizer: str = 'adam'
lion_beta1: float = 0.95
lion_beta2: float = 0.98
soap_shampoo_beta: float = 0.95
soap_precondition_frequency: int = 1
soap_use_kl_shampoo: bool = True
adaptive_muon_moment2_method: str = 'adamuon'
adaptive_muon_beta2: float = 0.95
adaptive_muon_eps: float = 1e-08
use_distributed_optimizer: bool = False
use_layer_wise_distributed_optimizer: bool = False
overlap_param_gather: bool = False
overlap_param_gather_with_optimizer_step: bool = False
optimizer_cpu_offload: bool = False
optimizer_offload_fraction: float = 0.0
use_torch_optimizer_for_cpu_offload: bool = False
overlap_cpu_optimizer_d2h_h2d: bool = False
pin_cpu_grads: bool = True
pin_cpu_params: bool = True
clip_grad: float = 1.0
log_num_zeros_in_grad: bool = False
barrier_with_L1_time: bool = False
timers: Opt[Callable] = None
config_logger_dir: str = ''
optimizer_cuda_graph: bool = False
""",
    GPTDatasetConfig: _LOADER + _GPT,
    MockGPTDatasetConfig: _LOADER + _GPT,
    GPTFIMDatasetConfig: _LOADER
    + _GPT
    + """
fim_rate: Opt[float] = None
fim_spm_rate: Opt[float] = None
fim_extra_tokens: Opt[dict[str, Any]] = None
fim_split_sample: Opt[str] = None
fim_fragment_rate: Opt[float] = None
fim_no_prefix: Opt[str] = None
fim_data: bool = True [init=False]
""",
}

# Fields of later Megatron-Core releases, which the oldest supported one (0.16.1) may lack
LATER_IN_MEGATRON_CORE: dict[type, set[str]] = {
    DistributedDataParallelConfig: {
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_all_gather_in_start_param_sync",
        "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_use_decoupled_grad",
    },
    OptimizerConfig: {
        "muon_nesterov",
        "muon_coefficient_type",
        "muon_scalar_optimizer",
        "lion_beta1",
        "lion_beta2",
        "soap_shampoo_beta",
        "soap_precondition_frequency",
        "soap_use_kl_shampoo",
        "adaptive_muon_moment2_method",
        "adaptive_muon_beta2",
        "adaptive_muon_eps",
        "use_layer_wise_distributed_optimizer",
        "optimizer_cuda_graph",
    },
}

Entry = tuple[Any, Any, bool]  # canonical type, default, is it given to the constructor


def _evaluate(text: str) -> Any:
    return eval(text, dict(_NAMES))


def _canonical(hint: Any) -> Any:
    """Make a type comparable: `Optional[List[int]]` and `list[int] | None` are one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return hint
    if origin is Literal:
        return (Literal, frozenset(args))
    inner = tuple(_canonical(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return (Union, frozenset(inner))
    return (origin, inner)


def _table(text: str) -> dict[str, Entry]:
    rows = {}
    for line in filter(None, text.splitlines()):
        match = re.fullmatch(r"(\w+): (.+?)(?: = (.+?))?( \[init=False\])?", line)
        assert match, line
        name, hint, default, computed = match.groups()
        rows[name] = (_canonical(_evaluate(hint)), MISSING if default is None else _evaluate(default), not computed)
    return rows


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _actual(cls: Any) -> dict[str, Entry]:
    hints = typing.get_type_hints(cls)
    return {field.name: (_canonical(hints[field.name]), _default(field), field.init) for field in fields(cls)}


def _params(tables: dict[type, str]) -> list[Any]:
    return [pytest.param(cls, text, id=cls.__name__) for cls, text in tables.items()]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(("cls", "text"), _params(KEYWORD_ONLY | POSITIONAL))
def test_fields_are_those_of_the_table(cls: Any, text: str) -> None:
    assert _actual(cls) == _table(text)


@pytest.mark.parametrize(("cls", "text"), _params(ON_MEGATRON_CORE))
def test_fields_on_top_of_megatron_core(cls: Any, text: str) -> None:
    """Fields that the installed release has beyond the table are its own."""
    actual, table = _actual(cls), _table(text)
    assert table.keys() - actual.keys() <= LATER_IN_MEGATRON_CORE.get(cls, set())
    assert {name: actual[name] for name in table if name in actual} == {
        name: entry for name, entry in table.items() if name in actual
    }
    of_megatron_core = {
        name for base in cls.__mro__ if base.__module__.startswith("megatron.") for name in _names(base)
    }
    assert actual.keys() - table.keys() <= of_megatron_core


def _names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


@pytest.mark.parametrize("cls", KEYWORD_ONLY, ids=lambda cls: cls.__name__)
def test_keyword_only(cls: Any) -> None:
    assert all(field.kw_only for field in fields(cls))
    if cls is not DatasetProvider:
        with pytest.raises(TypeError, match="positional argument"):
            cls(1)


@pytest.mark.parametrize("cls", POSITIONAL, ids=lambda cls: cls.__name__)
def test_positional(cls: Any) -> None:
    assert not any(field.kw_only for field in fields(cls))


@pytest.mark.parametrize("cls", [*KEYWORD_ONLY, *POSITIONAL], ids=lambda cls: cls.__name__)
def test_mutable_defaults_belong_to_one_instance(cls: Any) -> None:
    for field in fields(cls):
        if field.default_factory is not MISSING and isinstance(value := field.default_factory(), list | dict):
            assert field.default_factory() is not value, field.name


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (DatasetBuildContext(train_samples=1, valid_samples=2, test_samples=3), "train_samples"),
        (
            OptimizerConfigOverrideProviderContext(SchedulerConfig(), OptimizerConfig(), torch.nn.Linear(1, 1)),
            "optimizer_config",
        ),
    ],
    ids=["dataset", "optimizer"],
)
def test_contexts_are_frozen(context: Any, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(context, name, 5)


def test_context_of_the_optimizer_overrides_requires_all() -> None:
    assert _names(OptimizerConfigOverrideProviderContext) == ["scheduler_config", "optimizer_config", "model"]
    assert all(_default(field) is MISSING for field in fields(OptimizerConfigOverrideProviderContext))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            GPTDatasetConfig.__init__,
            "seq_length = None, skip_getting_attention_mask_from_dataset = True, data_path = None, *args, **kwargs",
        ),
        # Megatron-Bridge requires seq_length here; optional, a saved config (with sequence_length) can be read again
        (MockGPTDatasetConfig.__init__, "seq_length = None, **kwargs"),
        (
            GPTFIMDatasetConfig.__init__,
            "fim_rate = None, fim_spm_rate = None, fim_extra_tokens = None, fim_split_sample = None, "
            "fim_fragment_rate = None, fim_no_prefix = None, **kwargs",
        ),
        (OptimizerConfigOverrideProvider.build_config_overrides, "context"),
        (DatasetProvider.build_datasets, "context"),
    ],
)
def test_signatures(function: Callable[..., Any], expected: str) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(str(p).replace("=", " = ") for p in bare) == expected


@pytest.mark.parametrize(
    "cls",
    [
        *(CheckpointConfig, DataloaderConfig, DistributedDataParallelConfig, FinetuningDatasetConfig, GPTDatasetConfig),
        *(LoggerConfig, MockGPTDatasetConfig, NVRxStragglerDetectionConfig, OptimizerConfig, ProfilingConfig),
        *(SchedulerConfig, TensorInspectConfig, TrainingConfig),
    ],
    ids=lambda cls: cls.__name__,
)
def test_finalize_takes_nothing(cls: Any) -> None:
    assert list(inspect.signature(cls.finalize).parameters) == ["self"]


def test_a_dataset_provider_is_abstract() -> None:
    with pytest.raises(TypeError, match="build_datasets"):
        DatasetProvider()  # type: ignore[abstract]


def test_local_rank_is_read_when_the_config_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedInitConfig().local_rank == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert DistributedInitConfig().local_rank == 3
    assert DistributedInitConfig(local_rank=1).local_rank == 1


def test_lazy_init_is_lazy_mpu_init() -> None:
    config = DistributedInitConfig(lazy_mpu_init=True)
    assert config.lazy_init is True
    config.lazy_init = False
    assert config.lazy_mpu_init is False
    assert "lazy_init" not in _names(DistributedInitConfig)
