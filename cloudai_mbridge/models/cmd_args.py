"""`cmd_args` of a MegatronBridge test, as written (any value may be a list: an axis of the sweep) and as resolved.

Field names, defaults and meaning are CloudAI's; our own fields are marked by a comment.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import Field, FiniteFloat, create_model, model_validator

from cloudai_mbridge.models.base import Arguments, NameIfSet, PrivateText, StrictModel, Text
from cloudai_mbridge.models.slurm_values import SlurmTime

# CloudAI's default: path of the resolved configuration in the ranks' container
SAVED_CONFIG = "/nemo_run/configs/ConfigContainer.yaml"

FP8 = "fp8"  # CloudAI's; `fp8_recipe` divides it
# The second halves of the names of FP8 formats, as Megatron-Core calls the recipes
FP8_RECIPES = {"cs": "tensorwise", "ds": "delayed", "mx": "mxfp8", "sc": "blockwise"}
# Formats of compute_dtype that the embedded loop trains in; the second group needs Transformer Engine
IN_16_OR_32_BITS = ("bf16", "fp32")
QUANTIZED = (*(f"{FP8}_{short}" for short in FP8_RECIPES), "nvfp4")


def fp8_format(fp8_recipe: str) -> str | None:
    """Return fp8_cs for cs, fp8_cs or tensorwise; None for an unknown recipe."""
    text = fp8_recipe.lower().removeprefix(f"{FP8}_")
    return next((f"{FP8}_{short}" for short, name in FP8_RECIPES.items() if text in (short, name)), None)


_ELSEWHERE = {
    "env": "extra_env_vars of the test",
    "custom_env_vars": "extra_env_vars of the test",
    "custom_srun_args": "extra_srun_args of the system or of the scenario's test",
    "additional_slurm_params": "extra_srun_args of the system or of the scenario's test",
}


def names_in(value: str | list[str] | None) -> list[str]:
    """Read "[a, 'B']", "a, b" or a list of such as names; quotes, a pair of brackets and empty names are dropped."""
    names: list[str] = []
    for text in value if isinstance(value, list) else [value or ""]:
        text = text.strip().strip("\"'")
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        names += [name for part in inner.split(",") if (name := part.strip().strip("\"'").strip())]
    return names


class Launcher(StrEnum):
    """Who trains: our embedded loop, or Megatron-Bridge's own launcher script."""

    EMBEDDED = "embedded"
    MEGATRON_BRIDGE = "megatron_bridge"


def _refuse_options_of_others(cls: type[StrictModel], data: Any) -> Any:
    """Name a remedy for launcher options that are not arguments here."""
    for name in data if isinstance(data, dict) else ():
        if str(name).startswith(("kubeflow_", "dgxc_", "csp")):
            raise ValueError(f"{name} is for Kubernetes or DGX Cloud; this tool submits to Slurm; remove it")
        if name in _ELSEWHERE:
            raise ValueError(f"{name} is not an argument here; set {_ELSEWHERE[name]}")
    return data


# Fine-tuning of all weights, or of adapters. Megatron-Bridge's launcher has lora until 0.5, and peft since
ADAPTER_TASKS: Final = ("lora", "peft")
FINE_TUNING: Final = ("sft", *ADAPTER_TASKS)
TASKS: Final = ("pretrain", *FINE_TUNING)

_LONG: Final = "--"
READ: Final = "read"
NOT_READ: Final = "not read"


@dataclass(frozen=True)
class Argument:
    """Properties of an argument for the parts of mbridge, besides its name, type and default.

    flag: its option of Megatron-Bridge's launcher: the long one of the argument's own name, another, or none.
    config: its field in the embedded loop's configuration, as SECTION.FIELD. Rules look at it, so nothing else sets it.
    config_extra: the same without a rule: `extra_cmd_args` may set it instead.
    needs: without any of these arguments it has no effect in the embedded loop.
    means: its meaning outside of the training process.
    refused: why the embedded loop takes only the values of `harmless`, or the alternative.
    harmless: values without effect.
    compared: whether results that differ in it cannot be compared; "whether": only in whether it is set.
    estimated: whether estimates read it; NOT_READ: they do not, although it may change memory or time.
    """

    flag: str | None = _LONG
    config: str | None = None
    config_extra: str | None = None
    needs: tuple[str, ...] = ()
    means: str = ""
    refused: str = ""
    harmless: tuple[Any, ...] = ()
    compared: bool | Literal["whether"] = True
    estimated: Literal["read", "not read"] | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Add the argument's target to the field's JSON Schema, or why the embedded loop refuses it."""
        place = self.config or self.config_extra
        texts = (
            schema.get("description") or self.means,
            place and f"{place} of the embedded loop",
            self.refused and f"not for the embedded loop: {self.refused}",
            self.needs and f"needs {' or '.join(self.needs)}",
        )
        schema["description"] = "; ".join(text for text in texts if text)


def _arg(description: str | None = None, *, default: Any = None, repr: bool = True, **facts: Any) -> Any:
    return Field(default, description=description, repr=repr, json_schema_extra=Argument(**facts))


_PROFILERS = ("pytorch_profiler", "record_memory_history", "enable_nsys")
_DATA = "an option of the data set of the embedded loop"
_SRUN = "srun sets it on the nodes of the job"


class ResolvedCmdArgs(StrictModel):
    """Arguments of one point: scalars only, except values that are lists by meaning."""

    _not_arguments = model_validator(mode="before")(_refuse_options_of_others)

    @model_validator(mode="before")
    @classmethod
    def _one_name_of_a_format(cls, data: Any) -> Any:
        """Call "fp8" with a recipe as the formats of the embedded loop are called; upstream's takes them apart."""
        if not isinstance(data, dict) or (data.get("launcher"), data.get("compute_dtype")) != (Launcher.EMBEDDED, FP8):
            return data
        name = fp8_format(str(data.get("fp8_recipe") or ""))
        others = {key: value for key, value in data.items() if key != "fp8_recipe"}
        return data if name is None else {**others, "compute_dtype": name}

    # ours: the launcher; the others are CloudAI's
    launcher: Launcher = _arg(
        "embedded | megatron_bridge",
        default=Launcher.MEGATRON_BRIDGE,
        flag=None,
        means="selects the launcher",
        compared=False,
        estimated=READ,
    )

    gpu_type: Text = _arg(default="gb200", flag="-g", means="label of the hardware", estimated=READ)
    log_dir: Text = _arg(
        default="",
        flag="-l",
        means="upstream launcher's directory; logs lie in the point's directory here",
        compared=False,
    )
    time_limit: SlurmTime | None = _arg(flag=None, means="limit of the job", compared=False)
    container_image: Text = _arg(default="", flag=None, means="container of the job", compared=False)
    custom_mounts: Text | None = _arg(flag=None, means="mounts of the job's container", compared=False)
    num_gpus: int = _arg("ranks of the whole job", default=8, flag="-ng", means="number of ranks", estimated=READ)
    gpus_per_node: int | None = _arg(flag=None, means="placement")
    enable_vboost: bool | None = _arg(default=False, flag="-vb", means=_SRUN, estimated=NOT_READ)
    dryrun: bool | None = _arg(
        default=False, flag="-d", refused="`mbridge dry-run` does that", harmless=(False,), compared=False
    )
    enable_nsys: bool | None = _arg(
        default=False, flag="-en", config_extra="profiling.use_nsys_profiler", harmless=(False,)
    )
    detach: bool | None = _arg(flag=None, means="upstream launcher's option", compared=False)
    max_retries: int | None = _arg(default=1, means="upstream launcher's option", compared=False)
    nemorun_version: Text | None = _arg(flag=None, means="upstream launcher's environment", compared=False)

    model_family_name: NameIfSet = _arg(default="", flag="-m", means="label of the recipe", estimated=READ)
    model_recipe_name: NameIfSet = _arg(
        default="", flag="-mr", means="selects the recipe", compared=False, estimated=READ
    )
    use_recipes: bool | None = _arg(means="true: the recipe without its performance preset", estimated=READ)
    domain: Text | None = _arg(refused="the loop trains language models only", harmless=("llm",))
    task: Text = _arg(
        "pretrain sft lora; peft is lora",
        default="pretrain",
        means="selects what the recipe trains, and the preset",
        estimated=READ,
    )
    compute_dtype: Text = _arg(
        "bf16 fp8_cs fp8_mx fp8_sc nvfp4; embedded also fp8_ds and fp32",
        default="bf16",
        flag="-c",
        config="model.dtype",
        estimated=READ,
    )
    fp8_recipe: Text | None = _arg(
        flag=None, means='cs ds mx sc: which format compute_dtype = "fp8" is', estimated=NOT_READ
    )
    hf_token: PrivateText = _arg(default="", flag=None, repr=False, means="goes to the environment as HF_TOKEN")
    nemo_home: Text | None = _arg(
        flag="-nh", means="goes to the environment as NEMO_HOME, and is mounted", compared=False
    )
    wandb_key: PrivateText | None = _arg(flag=None, repr=False, means="goes to the environment as WANDB_API_KEY")
    wandb_project_name: Text | None = _arg(flag="-wdp", config_extra="logger.wandb_project", compared=False)
    wandb_entity_name: Text | None = _arg(
        flag="-wde", config_extra="logger.wandb_entity", needs=("wandb_project_name",), compared=False
    )
    wandb_experiment_name: Text | None = _arg(
        flag="-wdj", config_extra="logger.wandb_exp_name", needs=("wandb_project_name",), compared=False
    )
    wandb_save_dir: Text | None = _arg(
        flag="-wds", config_extra="logger.wandb_save_dir", needs=("wandb_project_name",), compared=False
    )

    hidden_size: int | None = _arg(config="model.hidden_size", estimated=READ)
    num_layers: int | None = _arg(config="model.num_layers", estimated=READ)
    pipeline_model_parallel_layout: Text | None = _arg(config="model.pipeline_model_parallel_layout", estimated=READ)
    first_k_dense_replace: int | None = _arg(
        means="number of first layers without experts: model.moe_layer_freq of the embedded loop", estimated=READ
    )

    use_tokendrop: bool | None = _arg(
        "false: a router forced into balance",
        means="experts of the embedded loop take their share of the tokens and drop others",
        estimated=NOT_READ,
    )
    use_megatron_fsdp: bool | None = _arg(config="ddp.use_megatron_fsdp", estimated=READ)
    nccl_ub: bool | None = _arg(config="ddp.nccl_ub", estimated=NOT_READ)
    cuda_graph_impl: Text | None = _arg(
        "none local transformer_engine; full_iteration since Megatron-Core 0.18",
        config="model.cuda_graph_impl",
        estimated=READ,
    )
    cuda_graph_scope: Text | list[Text] | None = _arg(
        "attn mlp moe moe_router moe_preprocess mamba; full_iteration alone; none of them: whole layers",
        config="model.cuda_graph_scope",
        needs=("cuda_graph_impl",),
        estimated=READ,
    )

    tp: int | None = _arg("tensor parallel size", flag="-tp", config="model.tensor_model_parallel_size", estimated=READ)
    pp: int | None = _arg(
        "pipeline parallel size", flag="-pp", config="model.pipeline_model_parallel_size", estimated=READ
    )
    cp: int | None = _arg("context parallel size", flag="-cp", config="model.context_parallel_size", estimated=READ)
    vp: int | None = _arg(
        "virtual pipeline stages per rank",
        flag="-vp",
        config="model.virtual_pipeline_model_parallel_size",
        estimated=READ,
    )
    ep: int | None = _arg("expert parallel size", flag="-ep", config="model.expert_model_parallel_size", estimated=READ)
    et: int | None = _arg(
        "expert tensor parallel size", flag="-et", config="model.expert_tensor_parallel_size", estimated=READ
    )
    mb: int | None = _arg("sequences per micro-batch", flag="-mb", config="train.micro_batch_size", estimated=READ)
    gb: int | None = _arg("sequences per step, all ranks", flag="-gb", config="train.global_batch_size", estimated=READ)
    seq_length: int | None = _arg("tokens per sequence", flag="-sl", config="model.seq_length", estimated=READ)

    moe_a2a_overlap: bool | None = _arg(config="comm_overlap.overlap_moe_expert_parallel_comm", estimated=READ)
    max_steps: int | None = _arg("optimizer steps", default=10, flag="-ms", config="train.train_iters", compared=False)
    recompute_num_layers: int | None = _arg(flag="-rl", config="model.recompute_num_layers", estimated=READ)
    activation_offload_layers: int | None = _arg(flag="-ol", config="model.cpu_offloading_num_layers", estimated=READ)
    recompute_modules: Text | list[Text] | None = _arg(config="model.recompute_modules", estimated=READ)

    lr: FiniteFloat | None = _arg(config="optimizer.lr")
    min_lr: FiniteFloat | None = _arg(config="optimizer.min_lr")
    warmup_iters: int | None = _arg(config="scheduler.lr_warmup_iters")

    pretrained_checkpoint: Text | None = _arg(config_extra="checkpoint.pretrained_checkpoint")
    save_dir: Text | None = _arg(config_extra="checkpoint.save", compared="whether")
    load_dir: Text | None = _arg(config_extra="checkpoint.load")
    save_interval: int | None = _arg(config_extra="checkpoint.save_interval", needs=("save_dir",))
    most_recent_k: int | None = _arg(config_extra="checkpoint.most_recent_k", needs=("save_dir",), compared=False)
    save_config_filepath: Text | None = _arg(
        default=SAVED_CONFIG, config_extra="logger.save_config_filepath", harmless=(SAVED_CONFIG,), compared=False
    )

    data: Text | None = _arg(
        "mock rp2 c4 squad squad_packed", means="data set of the embedded loop, which downloads nothing"
    )
    dataset_paths: Text | list[Text] | None = _arg(means=_DATA, needs=("data",))
    dataset_root: Text | None = _arg(means=_DATA, needs=("data",))
    index_mapping_dir: Text | None = _arg(means=_DATA, needs=("data",), compared=False)
    dataset_name: Text | None = _arg(refused="no launcher reads it; set data")
    packed_sequence: bool | None = _arg(means=_DATA, needs=("data",), harmless=(False,), estimated=NOT_READ)
    head_only: bool | None = _arg(
        refused="no launcher reads it; list the shards in dataset_paths", harmless=(False,), estimated=NOT_READ
    )
    tokenizer_type: Text | None = _arg(
        "NullTokenizer HuggingFaceTokenizer SentencePieceTokenizer", means="tokenizer of the embedded loop"
    )
    tokenizer_model: Text | None = _arg(means="its file or directory", needs=("tokenizer_type",))
    vocab_size: int | None = _arg(config="model.vocab_size", estimated=READ)

    pytorch_profiler: bool | None = _arg(flag="-pyp", config_extra="profiling.use_pytorch_profiler")
    profiling_start_step: int | None = _arg(config_extra="profiling.profile_step_start", needs=_PROFILERS)
    profiling_stop_step: int | None = _arg(config_extra="profiling.profile_step_end", needs=_PROFILERS)
    record_memory_history: bool | None = _arg(flag="-mh", config_extra="profiling.record_memory_history")
    profiling_gpu_metrics: bool | None = _arg(means="an option of nsys", needs=("enable_nsys",), harmless=(False,))
    profiling_ranks: int | Text | list[int] | None = _arg(config_extra="profiling.profile_ranks", needs=_PROFILERS)
    nsys_trace: Text | list[Text] | None = _arg(means="an option of nsys", needs=("enable_nsys",))
    nsys_extra_args: Arguments | list[Text] | None = _arg(means="options of nsys", needs=("enable_nsys",))

    config_variant: Text | None = _arg(flag="-cv", means="selects the preset", estimated=READ)
    list_config_variants: bool | None = _arg(
        refused="it waits for an answer on a terminal; rule E08 names the variants that exist",
        harmless=(False,),
        compared=False,
    )
    num_distributed_optimizer_instances: int | None = _arg(
        flag=None, config="ddp.num_distributed_optimizer_instances", estimated=READ
    )

    # ours: options of Megatron-Bridge 0.4 to 0.6 that CloudAI lacks
    offline: bool | None = _arg(means="goes to the environment as HF_HUB_OFFLINE", compared=False)
    packager: Text | None = _arg(
        refused="the loop is installed, and no repository is packed", harmless=("none",), compared=False
    )
    optimizer_type: Text | None = _arg(
        "adam muon", means="optimizer.optimizer of the embedded loop, and what goes with it", estimated=NOT_READ
    )
    moe_flex_dispatcher_backend: Text | None = _arg(
        '"None" is all-to-all', config="model.moe_flex_dispatcher_backend", estimated=READ
    )
    deterministic: bool | None = _arg(
        means="model.deterministic_mode of the embedded loop, and what goes with it", estimated=NOT_READ
    )
    num_moe_experts: int | None = _arg(config="model.num_moe_experts", estimated=READ)
    lock_gpu_freq: int | None = _arg("MHz", means=_SRUN, estimated=NOT_READ)
    peak_mem_clk: int | None = _arg("MHz; -1: as it is", means=_SRUN, estimated=NOT_READ)
    enable_pct_binding: bool | None = _arg(means="ranks run under numactl, on their own cores", estimated=NOT_READ)
    export_nsys_sqlite: bool | None = _arg(means="an option of nsys", needs=("enable_nsys",), harmless=(False,))
    distributed_timeout_minutes: int | None = _arg(config_extra="dist.distributed_timeout_minutes", compared=False)
    preempt_time: int | None = _arg(
        "seconds before the time limit",
        means="Slurm sends SIGTERM then, and the embedded loop saves and leaves",
        compared=False,
    )
    retry_on_testing_failure: bool | None = _arg(
        refused="it is the upstream launcher's own test of speed and losses; use `mbridge gate`",
        harmless=(False,),
        compared=False,
    )
    c4_root: Text | None = _arg(means=_DATA, needs=("data",))
    c4_train_shards: int | list[int] | None = _arg(means=_DATA, needs=("data",))
    dump_env: bool | None = _arg(means="rank 0 writes its environment, without credentials", compared=False)


ARGUMENTS: Mapping[str, Argument] = {
    name: replace(extra, flag=f"--{name}") if extra.flag == _LONG else extra
    for name, field in ResolvedCmdArgs.model_fields.items()
    if isinstance(extra := field.json_schema_extra, Argument)
}


def _sweepable(annotation: Any) -> Any:
    """Return the annotation that also takes a list of its scalars."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    scalars = tuple(o for o in options if o is not type(None) and get_origin(o) is not list)
    axis = Annotated[list[Union[scalars]], Field(min_length=1)]  # type: ignore[valid-type]  # noqa: UP007
    return Union[annotation, axis]  # noqa: UP007 - built at run time


MegatronBridgeCmdArgs = create_model(
    "MegatronBridgeCmdArgs",
    __base__=StrictModel,
    __validators__={"_not_arguments": model_validator(mode="before")(_refuse_options_of_others)},
    __doc__="Arguments as written: like ResolvedCmdArgs, but every value may be a list.",
    **{name: (_sweepable(field.annotation), field) for name, field in ResolvedCmdArgs.model_fields.items()},  # type: ignore[call-overload]
)
