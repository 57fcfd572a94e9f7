"""From a recipe and a point's `cmd_args` to a training config: one table says what becomes of every argument."""

import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import SAVED_CONFIG, ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, System
from cloudai_mbridge.models.values.pipeline_layout import num_stages
from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.recipes.load import Recipe
from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.not_done import asked_for
from cloudai_mbridge.training.schema import check_section_values

# cmd_args field -> (section, field) of the training config
MAPPED: dict[str, tuple[str, str]] = {
    "tp": ("model", "tensor_model_parallel_size"),
    "pp": ("model", "pipeline_model_parallel_size"),
    "cp": ("model", "context_parallel_size"),
    "vp": ("model", "virtual_pipeline_model_parallel_size"),
    "ep": ("model", "expert_model_parallel_size"),
    "et": ("model", "expert_tensor_parallel_size"),
    "mb": ("train", "micro_batch_size"),
    "gb": ("train", "global_batch_size"),
    "max_steps": ("train", "train_iters"),
    "seq_length": ("model", "seq_length"),
    "hidden_size": ("model", "hidden_size"),
    "num_layers": ("model", "num_layers"),
    "vocab_size": ("model", "vocab_size"),
    "pipeline_model_parallel_layout": ("model", "pipeline_model_parallel_layout"),
    "compute_dtype": ("model", "dtype"),
    "lr": ("optimizer", "lr"),
    "min_lr": ("optimizer", "min_lr"),
    "warmup_iters": ("scheduler", "lr_warmup_iters"),
    "recompute_num_layers": ("model", "recompute_num_layers"),
    "recompute_modules": ("model", "recompute_modules"),
}

# cmd_args field -> (section, field): no rule looks at these, so that extra_cmd_args may set them instead
PASSED_ON: dict[str, tuple[str, str]] = {
    "save_dir": ("checkpoint", "save"),
    "load_dir": ("checkpoint", "load"),
    "save_interval": ("checkpoint", "save_interval"),
    "most_recent_k": ("checkpoint", "most_recent_k"),
    "pretrained_checkpoint": ("checkpoint", "pretrained_checkpoint"),
    "pytorch_profiler": ("profiling", "use_pytorch_profiler"),
    "record_memory_history": ("profiling", "record_memory_history"),
    "profiling_start_step": ("profiling", "profile_step_start"),
    "profiling_stop_step": ("profiling", "profile_step_end"),
    "profiling_ranks": ("profiling", "profile_ranks"),
    "wandb_project_name": ("logger", "wandb_project"),
    "wandb_entity_name": ("logger", "wandb_entity"),
    "wandb_experiment_name": ("logger", "wandb_exp_name"),
    "wandb_save_dir": ("logger", "wandb_save_dir"),
}

# a field of PASSED_ON that does nothing unless one of these is set
_PROFILERS = ("pytorch_profiler", "record_memory_history")
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("save_interval", "most_recent_k"), ("save_dir",)),
    **dict.fromkeys(("profiling_start_step", "profiling_stop_step", "profiling_ranks"), _PROFILERS),
    **dict.fromkeys(("wandb_entity_name", "wandb_experiment_name", "wandb_save_dir"), ("wandb_project_name",)),
}

# what is of the model whoever trains it
_MODEL_FACTS = frozenset({"hidden_size", "num_layers", "vocab_size"})

_ARGUMENT_OF = {place: name for name, place in MAPPED.items()}

# cmd_args fields that mean something outside of the training process
ELSEWHERE: dict[str, str] = {
    "launcher": "selects the launcher",
    "model_family_name": "label of the recipe",
    "model_recipe_name": "selects the recipe",
    "num_gpus": "number of ranks",
    "gpus_per_node": "placement",
    "gpu_type": "label of the hardware",
    "time_limit": "limit of the job",
    "container_image": "container of the job",
    "log_dir": "upstream launcher's directory; logs lie in the point's directory here",
    "detach": "upstream launcher's option",
    "max_retries": "upstream launcher's option",
    "nemorun_version": "upstream launcher's environment",
    "hf_token": "goes to the environment as HF_TOKEN",
    "wandb_key": "goes to the environment as WANDB_API_KEY",
    "custom_mounts": "mounts of the job's container",
}

# the rest: why the embedded loop takes only the values of HARMLESS, if any, and what to set instead
_FINETUNING = "to fine-tune set pretrained_checkpoint, and dataset.* in extra_cmd_args"
_NSYS = "set the [nsys] table of the test"
_LAUNCHER = "an option of the upstream launcher"
_DATA = "set dataset._target_ and dataset.data_path in extra_cmd_args"
_TOKENIZER = "set tokenizer.tokenizer_type and tokenizer.tokenizer_model in extra_cmd_args"
NOT_EMBEDDED: dict[str, str] = {
    "dryrun": "`mbridge dry-run` does that",
    "enable_vboost": "it sets the clocks of the GPUs through the upstream launcher's own srun",
    "use_recipes": _LAUNCHER,
    "domain": "the loop trains language models only",
    "task": _FINETUNING,
    "nemo_home": "the loop caches nothing",
    "config_variant": "a variant is a recipe of its own here",
    "list_config_variants": "`mbridge list` does that",
    "first_k_dense_replace": "set model.moe_layer_freq in extra_cmd_args",
    "use_tokendrop": "the loop drops no tokens",
    "use_megatron_fsdp": "the loop shards no parameters",
    "nccl_ub": "it needs Megatron-FSDP or SHARP",
    "cuda_graph_impl": "the loop captures no CUDA graphs",
    "cuda_graph_scope": "the loop captures no CUDA graphs",
    "moe_a2a_overlap": "the schedule that overlaps the experts' exchange is not wired in",
    "activation_offload_layers": "the loop offloads nothing",
    "fp8_recipe": "FP8 needs Transformer Engine",
    "num_distributed_optimizer_instances": "the loop makes one data-parallel group",
    "save_config_filepath": "the resolved configuration is written beside the point's results",
    **dict.fromkeys(("data", "dataset_paths", "dataset_root", "index_mapping_dir", "dataset_name"), _DATA),
    **dict.fromkeys(("packed_sequence", "head_only"), _FINETUNING),
    **dict.fromkeys(("tokenizer_type", "tokenizer_model"), _TOKENIZER),
    "enable_nsys": _NSYS,
    "nsys_trace": f"{_NSYS}: trace",
    "nsys_extra_args": f"{_NSYS}: extra_args",
    "profiling_gpu_metrics": f"{_NSYS}: gpu_metrics_devices",
    **dict.fromkeys(("packager", "preempt_time", "retry_on_testing_failure"), _LAUNCHER),
    "dump_env": "every report holds the environment",
    "offline": "it sets HF_HUB_OFFLINE; set that in extra_env_vars",
    "optimizer_type": "set optimizer.optimizer in extra_cmd_args",
    "moe_flex_dispatcher_backend": "set model.moe_flex_dispatcher_backend in extra_cmd_args",
    "deterministic": "set model.deterministic_mode in extra_cmd_args",
    "num_moe_experts": "set model.num_moe_experts in extra_cmd_args",
    "distributed_timeout_minutes": "set dist.distributed_timeout_minutes in extra_cmd_args",
    **dict.fromkeys(("lock_gpu_freq", "peak_mem_clk"), "the loop leaves the clocks of the GPUs alone"),
    "enable_pct_binding": "the loop binds no cores",
    "export_nsys_sqlite": f"{_NSYS}: extra_args = ['--export=sqlite']",
    **dict.fromkeys(("c4_root", "c4_train_shards"), _DATA),
}

# cmd_args fields whose listed values ask for nothing, so that they may be set
HARMLESS: dict[str, tuple[Any, ...]] = {
    "task": ("pretrain",),
    "dryrun": (False,),
    "domain": ("llm",),
    "enable_vboost": (False,),
    "enable_nsys": (False,),
    "use_megatron_fsdp": (False,),
    "use_tokendrop": (False,),
    "moe_a2a_overlap": (False,),
    "cuda_graph_impl": ("none", ""),
    "activation_offload_layers": (0,),
    "nccl_ub": (False,),
    "num_distributed_optimizer_instances": (1,),
    "data": ("mock",),
    "save_config_filepath": (SAVED_CONFIG,),
    **dict.fromkeys(("offline", "deterministic", "enable_pct_binding", "export_nsys_sqlite", "dump_env"), (False,)),
    "retry_on_testing_failure": (False,),
    "peak_mem_clk": (-1,),
}


def unsupported_args(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the set arguments that the embedded loop would have to ignore, with their values."""
    return {
        name: value
        for name in sorted(args.model_fields_set - MAPPED.keys() - ELSEWHERE.keys())
        if (value := getattr(args, name)) is not None and value not in HARMLESS.get(name, ())
        if name not in PASSED_ON or _is_idle(name, args)
    }


def why_unsupported(name: str) -> str:
    """Return why the embedded loop would have to ignore an argument, or what to set instead."""
    return NOT_EMBEDDED.get(name) or f"no effect without {' or '.join(_NEEDS[name])}"


def _is_idle(name: str, args: ResolvedCmdArgs) -> bool:
    """Return whether an argument belongs to something that is not switched on."""
    return name in _NEEDS and not any(getattr(args, other) for other in _NEEDS[name])


def with_recipe_defaults(args: ResolvedCmdArgs, recipe: Recipe, but: Collection[str] = ()) -> ResolvedCmdArgs:
    """Fill in what the recipe decides where the user said nothing, so that rules and reports see every size."""
    missing = {
        name: default
        for name, (section, field) in MAPPED.items()
        if name not in but and getattr(args, name) is None and (default := recipe.default(section, field)) is not None
    }
    return args.model_copy(update=missing)


def with_model_facts(args: ResolvedCmdArgs, recipe: Recipe, but: Collection[str] = ()) -> ResolvedCmdArgs:
    """Fill in the sizes of the recipe's model. How upstream's recipe of this name is run, is upstream's to decide."""
    return with_recipe_defaults(args, recipe, but={*but} | (MAPPED.keys() - _MODEL_FACTS))


def core_release(system: System | None) -> str | None:
    """Return the release of Megatron-Core that trains on this system; None where a job finds that out itself."""
    if not isinstance(system, LocalSystem) or system.python_executable is not None:
        return None
    return installed_release()


def training_config(
    recipe: Recipe, args: ResolvedCmdArgs, extra: Mapping[str, str], core: str | None = None
) -> dict[str, Any]:
    """Return the training config as plain data, checked as the training process will check it.

    core: the release of Megatron-Core; None: unknown, keys of any release pass.

    Raises:
        BadInput: `extra_cmd_args` name an unknown key or have a value of the wrong type.
    """
    sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in recipe.sections.items()}
    for name, (section, field) in MAPPED.items():
        if (value := getattr(args, name)) is not None:
            sections.setdefault(section, {})[field] = value
    _derive(sections["model"], recipe)
    data = container_data(sections)
    for name, (section, field) in PASSED_ON.items():
        if (value := getattr(args, name)) not in (None, ""):
            if f"{section}.{field}" in extra:
                raise BadInput(f"extra_cmd_args: {section}.{field} is set by cmd_args.{name}, too; remove one of them")
            data.setdefault(section, {})[field] = _ranks(value) if name == "profiling_ranks" else value
    for key, text in extra.items():
        section, _, field = key.partition(".")
        if not field:
            raise BadInput(f"extra_cmd_args: {key!r} is not SECTION.FIELD such as optimizer.lr")
        if argument := _ARGUMENT_OF.get((section, field)):
            raise BadInput(f"extra_cmd_args: {key!r} is cmd_args.{argument}; set it there, so that the rules see it")
        if not isinstance(data.setdefault(section, {}), dict):
            raise BadInput(f"extra_cmd_args: {key!r}: {section} is chosen by cmd_args.compute_dtype; set that")
        data[section][field] = parse_value(text)
    _refuse_not_done(data)
    try:
        check_section_values(data, release=core)
    except ConfigError as error:
        raise BadInput(f"training config: {error}") from None
    return data


def _ranks(value: Any) -> list[int]:
    """Return the ranks of 3, "0,3" or [0, 3].

    Raises:
        BadInput: the text has another form.
    """
    texts = value.strip("[] ").split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise BadInput(f"cmd_args.profiling_ranks: {value!r} is not a list of ranks such as '0,3'") from None


def _refuse_not_done(data: Mapping[str, Any]) -> None:
    """Refuse what the training loop would refuse, before a job is submitted for it."""

    def get(section: str, name: str, default: Any) -> Any:
        values = data.get(section)
        return values.get(name, default) if isinstance(values, dict) else default

    if asked := list(asked_for(get)):
        raise BadInput(f"training config: the training loop does not do this yet: {'; '.join(asked)}")


def _derive(model: dict[str, Any], recipe: Recipe) -> None:
    """Apply what the arguments imply, as Megatron-Bridge's recipes do."""
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model[field] = model.get(field) or 1
    if model.get("virtual_pipeline_model_parallel_size") == 1:
        model["virtual_pipeline_model_parallel_size"] = None
    if not model.get("pipeline_model_parallel_layout"):
        pp, vp = model["pipeline_model_parallel_size"], model.get("virtual_pipeline_model_parallel_size")
        is_whole = model["num_layers"] == recipe.default("model", "num_layers")
        model["pipeline_model_parallel_layout"] = recipe_layout(recipe, pp, vp, with_mtp=False) if is_whole else None
    elif model.get("virtual_pipeline_model_parallel_size") is None:
        virtual = num_stages(model["pipeline_model_parallel_layout"]) // model["pipeline_model_parallel_size"]
        model["virtual_pipeline_model_parallel_size"] = virtual if virtual > 1 else None
    model["sequence_parallel"] = model["tensor_model_parallel_size"] > 1
    if isinstance(modules := model.get("recompute_modules"), str):
        model["recompute_modules"] = [m for part in modules.strip("[]").split(",") if (m := part.strip(" '\""))]
    if model.get("recompute_num_layers"):
        model.update(recompute_granularity="full", recompute_method="block", recompute_modules=None)
    elif model.get("recompute_modules"):
        model["recompute_granularity"] = "selective"
    if isinstance(pattern := model.get("moe_layer_freq"), list):  # fewer or more layers than the recipe has
        layers = model["num_layers"]
        model["moe_layer_freq"] = (pattern + pattern[-1:] * layers)[:layers]


def recipe_layout(recipe: Recipe, pp: int, vp: int | None, *, with_mtp: bool) -> str | None:
    """Return the recipe's explicit pipeline layout for pp*vp stages, if it has one."""
    layout = recipe.pipeline_layouts.get(str(pp * (vp or 1)))
    return layout if layout is None or with_mtp else layout.replace("m", "")


def parse_value(text: str) -> Any:
    """Read a value as TOML would (number, boolean, list, quoted string); anything else is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # not TOML, or a number of thousands of digits
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
