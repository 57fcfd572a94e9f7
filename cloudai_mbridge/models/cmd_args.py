"""`cmd_args` of a MegatronBridge test, as written (any value may be a list: an axis of the sweep) and as resolved.

Field names, defaults and meaning are CloudAI's; the comment at a field of ours says so.
"""

import types
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Field, FiniteFloat, create_model, model_validator

from cloudai_mbridge.models.base import Arguments, NameIfSet, PrivateText, StrictModel, Text
from cloudai_mbridge.models.values.time_limit import SlurmTime

# CloudAI's default: where the ranks' container keeps the resolved configuration
SAVED_CONFIG = "/nemo_run/configs/ConfigContainer.yaml"

_NO_SLURM = ("kubeflow_", "dgxc_", "csp")
_ELSEWHERE = {
    "env": "extra_env_vars of the test",
    "custom_env_vars": "extra_env_vars of the test",
    "custom_srun_args": "extra_srun_args of the system or of the scenario's test",
    "additional_slurm_params": "extra_srun_args of the system or of the scenario's test",
}


class Launcher(StrEnum):
    """Who trains: our embedded loop, or Megatron-Bridge's own launcher script."""

    EMBEDDED = "embedded"
    MEGATRON_BRIDGE = "megatron_bridge"


class _LauncherArgs(StrictModel):
    """Says what becomes of launcher options that are not arguments here."""

    @model_validator(mode="before")
    @classmethod
    def _not_arguments(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if str(name).startswith(_NO_SLURM):
                raise ValueError(f"{name} is for Kubernetes or DGX Cloud; this tool submits to Slurm; remove it")
            if name in _ELSEWHERE:
                raise ValueError(f"{name} is not an argument here; set {_ELSEWHERE[name]}")
        return data


class ResolvedCmdArgs(_LauncherArgs):
    """Arguments of one point: scalars only, but for values that are lists by meaning."""

    # ours: which launcher; the rest are CloudAI's
    launcher: Launcher = Field(Launcher.MEGATRON_BRIDGE, description="embedded | megatron_bridge")

    gpu_type: Text = "gb200"
    log_dir: Text = ""
    time_limit: SlurmTime | None = None
    container_image: Text = ""
    custom_mounts: Text | None = None
    num_gpus: int = Field(8, description="ranks of the whole job")
    gpus_per_node: int | None = None
    enable_vboost: bool | None = False
    dryrun: bool | None = False
    enable_nsys: bool | None = False
    detach: bool | None = None
    max_retries: int | None = 1
    nemorun_version: Text | None = None

    model_family_name: NameIfSet = ""
    model_recipe_name: NameIfSet = ""
    use_recipes: bool | None = None
    domain: Text | None = None
    task: Text = "pretrain"
    compute_dtype: Text = Field("bf16", description="bf16 fp8_cs fp8_mx fp8_sc nvfp4; embedded also fp32")
    fp8_recipe: Text | None = None
    hf_token: PrivateText = Field("", repr=False)
    nemo_home: Text | None = None
    wandb_key: PrivateText | None = Field(None, repr=False)
    wandb_project_name: Text | None = None
    wandb_entity_name: Text | None = None
    wandb_experiment_name: Text | None = None
    wandb_save_dir: Text | None = None

    hidden_size: int | None = None
    num_layers: int | None = None
    pipeline_model_parallel_layout: Text | None = None
    first_k_dense_replace: int | None = None

    use_tokendrop: bool | None = None
    use_megatron_fsdp: bool | None = None
    nccl_ub: bool | None = None
    cuda_graph_impl: Text | None = None
    cuda_graph_scope: Text | list[Text] | None = None

    tp: int | None = Field(None, description="tensor parallel size")
    pp: int | None = Field(None, description="pipeline parallel size")
    cp: int | None = Field(None, description="context parallel size")
    vp: int | None = Field(None, description="virtual pipeline stages per rank")
    ep: int | None = Field(None, description="expert parallel size")
    et: int | None = Field(None, description="expert tensor parallel size")
    mb: int | None = Field(None, description="sequences per micro-batch")
    gb: int | None = Field(None, description="sequences per step, all ranks")
    seq_length: int | None = Field(None, description="tokens per sequence")

    moe_a2a_overlap: bool | None = None
    max_steps: int | None = Field(10, description="optimizer steps")
    recompute_num_layers: int | None = None
    activation_offload_layers: int | None = None
    recompute_modules: Text | list[Text] | None = None

    lr: FiniteFloat | None = None
    min_lr: FiniteFloat | None = None
    warmup_iters: int | None = None

    pretrained_checkpoint: Text | None = None
    save_dir: Text | None = None
    load_dir: Text | None = None
    save_interval: int | None = None
    most_recent_k: int | None = None
    save_config_filepath: Text | None = SAVED_CONFIG

    data: Text | None = None
    dataset_paths: Text | list[Text] | None = None
    dataset_root: Text | None = None
    index_mapping_dir: Text | None = None
    dataset_name: Text | None = None
    packed_sequence: bool | None = None
    head_only: bool | None = None
    tokenizer_type: Text | None = None
    tokenizer_model: Text | None = None
    vocab_size: int | None = None

    pytorch_profiler: bool | None = None
    profiling_start_step: int | None = None
    profiling_stop_step: int | None = None
    record_memory_history: bool | None = None
    profiling_gpu_metrics: bool | None = None
    profiling_ranks: int | Text | list[int] | None = None
    nsys_trace: Text | list[Text] | None = None
    nsys_extra_args: Arguments | list[Text] | None = None

    config_variant: Text | None = None
    list_config_variants: bool | None = None
    num_distributed_optimizer_instances: int | None = None

    # ours: options of Megatron-Bridge 0.4 to 0.6 that CloudAI does not know
    offline: bool | None = None
    packager: Text | None = None
    optimizer_type: Text | None = None
    moe_flex_dispatcher_backend: Text | None = Field(None, description='"None" asks for all-to-all')
    deterministic: bool | None = None
    num_moe_experts: int | None = None
    lock_gpu_freq: int | None = Field(None, description="MHz")
    peak_mem_clk: int | None = Field(None, description="MHz")
    enable_pct_binding: bool | None = None
    export_nsys_sqlite: bool | None = None
    distributed_timeout_minutes: int | None = None
    preempt_time: int | None = Field(None, description="seconds before the time limit")
    retry_on_testing_failure: bool | None = None
    c4_root: Text | None = None
    c4_train_shards: int | list[int] | None = None
    dump_env: bool | None = None


def _sweepable(annotation: Any) -> Any:
    """Return the annotation that also takes a list of its scalars."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    scalars = tuple(o for o in options if o is not type(None) and get_origin(o) is not list)
    axis = Annotated[list[Union[scalars]], Field(min_length=1)]  # type: ignore[valid-type]  # noqa: UP007
    return Union[annotation, axis]  # noqa: UP007 - built at run time


MegatronBridgeCmdArgs = create_model(
    "MegatronBridgeCmdArgs",
    __base__=_LauncherArgs,
    __doc__="Arguments as written: like ResolvedCmdArgs, but every value may be a list.",
    **{name: (_sweepable(field.annotation), field) for name, field in ResolvedCmdArgs.model_fields.items()},  # type: ignore[call-overload]
)
