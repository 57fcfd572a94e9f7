"""What a valid configuration may ask for and this loop does not do. Standard library only: planning reads it too."""

from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()

# section.field -> the values that ask for nothing; a section that is None asks for nothing either
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "train.rampup_batch_size": (None,),
    "train.decrease_batch_size_if_needed": (False,),
    "train.empty_unused_memory_level": (0,),
    "train.check_weight_hash_across_dp_replicas_interval": (None,),
    "train.train_sync_interval": (None,),
    "train.exit_interval": (None,),
    "train.exit_duration_in_mins": (None,),
    "train.exit_signal_handler": (False,),
    "train.exit_signal_handler_for_training": (False,),
    "train.exit_signal_handler_for_dataloader": (False,),
    "train.manual_gc": (False,),
    "train.iterations_to_skip": ([],),
    "validation.eval_interval": (None,),
    "validation.skip_train": (False,),
    "validation.test_mode": (False,),
    "checkpoint.save": (None,),
    "checkpoint.load": (None,),
    "checkpoint.pretrained_checkpoint": (None,),
    "checkpoint.non_persistent_save_interval": (None,),
    "rerun_state_machine.rerun_mode": ("disabled",),
    "rerun_state_machine.error_injection_rate": (0,),
    "rerun_state_machine.check_for_nan_in_loss": (True,),
    "rerun_state_machine.check_for_spiky_loss": (False,),
    "rng.te_rng_tracker": (False,),
    "rng.inference_rng_tracker": (False,),
    "rng.data_parallel_random_init": (False,),
    "logger.tensorboard_dir": (None,),
    "logger.wandb_project": (None,),
    "logger.mlflow_experiment": (None,),
    "logger.comet_project": (None,),
    "logger.log_params_norm": (False,),
    "logger.log_num_zeros_in_grad": (False,),
    "logger.log_max_attention_logit": (False,),
    "logger.log_progress": (False,),
    "logger.log_energy": (False,),
    "profiling.use_nsys_profiler": (False,),
    "profiling.use_pytorch_profiler": (False,),
    "profiling.record_memory_history": (False,),
    "tensor_inspect.enabled": (False,),
    "ft.enable_ft_package": (False,),
    "ft.simulate_fault": (False,),
    "straggler.log_straggler": (False,),
    "nvrx_straggler.enabled": (False,),
    "inprocess_restart.enabled": (False,),
    "dist.use_megatron_fsdp": (False,),
    "dist.use_torch_fsdp2": (False,),
    "dist.use_tp_pp_dp_mapping": (False,),
    "dist.use_sharp": (False,),
    "dist.lazy_mpu_init": (False,),
    "dist.disable_jit_fuser": (False,),
    "dist.enable_megatron_core_experimental": (False,),
    "dist.use_decentralized_pg": (False,),
    "dist.nccl_communicator_config_path": (None,),
    "dist.high_priority_stream_groups": (None, []),
    "dist.distributed_timeout_seconds_after_init": (None,),
    "dist.external_gpu_device_mapping": (False,),
    "ddp.use_megatron_fsdp": (False,),
    "ddp.nccl_ub": (False,),
    "ddp.num_distributed_optimizer_instances": (1,),
    "comm_overlap.overlap_moe_expert_parallel_comm": (None, False),
    "comm_overlap.delay_wgrad_compute": (None, False),
    "model.overlap_moe_expert_parallel_comm": (False,),
    "model.tp_comm_overlap": (False,),
    "model.fp8": (None,),
    "model.fp4": (None,),
    "model.softmax_type": ("vanilla",),
    "model.use_transformer_engine_op_fuser": (False,),
    "model.use_transformer_engine_full_layer_spec": (False,),
    "model.init_model_with_meta_device": (False,),
    "model.restore_modelopt_state": (False,),
    "model.use_arbitrary_attention_mask": (None, False),
    "model.cuda_graph_impl": ("none",),
    "model.enable_cuda_graph": (False,),
    "model.external_cuda_graph": (False,),
    "model.cpu_offloading": (False,),
    "model.fine_grained_activation_offloading": (False,),
    "model.hierarchical_context_parallel_sizes": (None,),
    "model.hybrid_context_parallel": (False,),
    "dataset.dataloader_type": (None, "single"),
    "dataset.reset_attention_mask": (False,),
    "optimizer.overlap_param_gather_with_optimizer_step": (False,),
    "tokenizer.tokenizer_type": (None, "NullTokenizer"),
}


def asked_for(get: Callable[[str, str, Any], Any]) -> Iterator[str]:
    """Yield, in words, every field that asks for what the loop does not do.

    get: (section, field, default) -> the field's value, or the default where there is no such section or field.
    """
    for path, harmless in ASKS_FOR_NOTHING.items():
        section, _, name = path.partition(".")
        value = get(section, name, _MISSING)
        if value is not _MISSING and value not in harmless:
            yield f"{path} = {value!r} (use {' or '.join(map(repr, harmless))})"
