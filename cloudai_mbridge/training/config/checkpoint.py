"""Settings of checkpoints: content, intervals, directories and formats."""

import os
from dataclasses import dataclass
from typing import Literal

_Strictness = Literal[
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
]
_ASYNC_STRATEGIES = ("nvrx", "mcore")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and loading of checkpoints. Intervals count iterations."""

    save: str | None = None
    save_interval: int | None = None
    save_wgrads_interval: int | None = None
    save_dgrads_interval: int | None = None
    save_params_interval: int | None = None
    save_activations_interval: int | None = None
    save_tokens_per_expert_interval: int | None = None
    save_retain_interval: int | None = None  # keep every n-th checkpoint, delete the others
    most_recent_k: int | None = -1  # -1: keep all
    save_optim: bool = True
    save_rng: bool = True
    load: str | None = None
    load_optim: bool = True
    load_main_params_from_ckpt: bool = False
    load_rng: bool = True
    # a second, cheaper stream of checkpoints
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None
    non_persistent_local_ckpt_algo: Literal["fully_parallel", "atomic"] = "fully_parallel"
    finetune: bool = False
    pretrained_checkpoint: str | None = None
    ckpt_step: int | None = None  # the iteration to load; None: the latest
    use_checkpoint_args: bool = False
    use_mp_args_from_checkpoint_args: bool = False
    use_tokenizer_model_from_checkpoint_args: bool = True
    exit_on_missing_checkpoint: bool = False
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    auto_detect_ckpt_format: bool = False
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = None
    ckpt_convert_save: str | None = None
    ckpt_convert_update_legacy_dist_opt_format: bool = False
    fully_parallel_save: bool = True
    async_save: bool = False
    async_strategy: str = "nvrx"
    use_persistent_ckpt_worker: bool = True
    async_ckpt_cpu_priority: int = 10
    async_ckpt_io_priority: int | None = 3
    async_ckpt_use_cpu_shm: bool = False
    fully_parallel_load: bool = False
    ckpt_fully_parallel_load_exchange_algo: Literal["broadcast", "gather_rounds", "gather_object"] = "broadcast"
    ckpt_fully_parallel_save_process_group: Literal["dp", "ep_dp"] = "dp"
    ckpt_fully_parallel_load_process_group: Literal["dp", "ep_dp"] = "dp"
    ckpt_assume_constant_structure: bool = False
    ckpt_load_validate_sharding_integrity: bool = True
    verify_integrity: bool = False
    stream_ckpt_dequant: bool = True
    strict_fsdp_dtensor_load: bool = False
    dist_ckpt_strictness: _Strictness = "assume_ok_unexpected"  # the effect of keys that do not match
    dist_ckpt_save_pre_mcore_014: bool = False
    dist_ckpt_optim_fully_reshardable: bool = False
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    save_tokenizer_assets: bool = True
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2
    storage_writers_per_rank: int = 1
    dist_ckpt_workers: int = 1
    also_save_hf_checkpoint: bool = False
    hf_source_path: str | None = None
    hf_trust_remote_code: bool = False
    hf_distributed_save: bool = False
    hf_save_every_n_ranks: int = 1
    async_write_results_mp_mode: str = "fork"
    custom_manager_class: str | None = None

    def __post_init__(self) -> None:
        """Check the strategy. Raises AssertionError: a strategy that does not exist."""
        assert self.async_strategy in _ASYNC_STRATEGIES, (
            f"async_strategy={self.async_strategy!r} is not one of {', '.join(_ASYNC_STRATEGIES)}"
        )

    def finalize(self) -> None:
        """Check fields against each other.

        ValueError: `ckpt_step` without `load`.
        AssertionError: any other rule; the message names the fields and their values.
        """
        self.__post_init__()
        path = self.pretrained_checkpoint
        assert path is None or os.path.exists(path), f"pretrained_checkpoint={path} does not exist"
        assert not (self.load_main_params_from_ckpt and self.load_optim), (
            "load_main_params_from_ckpt needs load_optim=False: the optimizer state holds main parameters of its own"
        )
        if self.ckpt_step is not None and self.load is None:
            raise ValueError(f"ckpt_step={self.ckpt_step} needs `load`: the source of that iteration")
        if self.async_save:
            assert self.save is not None, "async_save needs `save`: there is nowhere to write to"
            assert self.use_persistent_ckpt_worker, "async_save needs use_persistent_ckpt_worker=True"
        assert not (self.dist_ckpt_optim_fully_reshardable and self.distrib_optim_fully_reshardable_mem_efficient), (
            "dist_ckpt_optim_fully_reshardable needs distrib_optim_fully_reshardable_mem_efficient=False"
        )
