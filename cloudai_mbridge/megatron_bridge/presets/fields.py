"""Where Megatron-Bridge's configuration holds what its launcher decides."""

# Our argument (or, after it, what its meaning depends on), and the field of the configuration that holds it.
FIELDS = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "et": "model.expert_tensor_parallel_size",
    "mb": "train.micro_batch_size",
    "gb": "train.global_batch_size",
    "seq_length": "model.seq_length",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "nccl_ub": "ddp.nccl_ub",
    "cuda_graph_impl": "model.cuda_graph_impl",
    "cuda_graph_scope": "model.cuda_graph_scope",
    "moe_a2a_overlap": "comm_overlap.overlap_moe_expert_parallel_comm",
    "recompute_granularity": "model.recompute_granularity",
    "recompute_method": "model.recompute_method",
    "recompute_num_layers": "model.recompute_num_layers",
    "recompute_modules": "model.recompute_modules",
    "activation_offload_layers": "model.cpu_offloading_num_layers",
    "pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "moe_flex_dispatcher_backend": "model.moe_flex_dispatcher_backend",
    "sequence_parallel": "model.sequence_parallel",
}
