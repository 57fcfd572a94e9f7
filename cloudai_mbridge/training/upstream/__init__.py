"""Modules of Megatron-Bridge whose contents have another place here, served under their names for users' scripts.

`from cloudai_mbridge.training.utils.train_utils import training_log` works as after renaming the package in a script.
A name is imported from its home on first access. Parts of Megatron-Bridge that are missing here end in one line.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_HERE = "upstream.names"
# Module below `training` -> home below `training` -> names
MODULES: dict[str, dict[str, str]] = {
    "fault_tolerance": {
        "resilience.fault_tolerance": "setup on_training_step_start on_training_step_end on_eval_step_start"
        " on_eval_step_end on_checkpointing_start on_checkpointing_end on_checkpoint_loaded shutdown"
        " maybe_setup_simulated_fault"
    },
    "forward_step_func_types": {
        _HERE: "LossReduced TwoTupleLossReturn ThreeTupleLossReturn InferenceLossReturn LossFunctionReturn LossFunction"
        " TwoArgForwardStep ThreeArgForwardStep ThreeArgStateForwardStep FourArgForwardStep ForwardStepFunctor"
        " ForwardStepFunc ForwardStepCallable ForwardStepResult"
    },
    "inprocess_restart": {"resilience.inprocess_restart": "maybe_wrap_for_inprocess_restart"},
    "nvrx_straggler": {
        "resilience.straggler": "NVRxStragglerDetectionManager check_nvrx_straggler_detection"
        " safe_shutdown_nvrx_straggler_manager",
        _HERE: "HAVE_NVRX",
    },
    "utils": {},
    "utils.checkpoint_utils": {
        "checkpointing.layout": "checkpoint_exists get_checkpoint_name get_checkpoint_run_config_filename"
        " get_checkpoint_train_state_filename",
        _HERE: "CONFIG_FILE TRACKER_PREFIX TRAIN_STATE_FILE ensure_directory_exists file_exists"
        " get_checkpoint_tracker_filename read_run_config read_train_state",
    },
    "utils.config_utils": {"config.container": "_ConfigContainerBase"},
    "utils.flop_utils": {"flops": "num_floating_point_operations"},
    "utils.log_utils": {
        "reporting.progress_log": "append_to_progress_log",
        "loop.between_steps": "barrier_and_log",
        _HERE: "setup_logging",
    },
    "utils.omegaconf_utils": {_HERE: "OverridesError apply_overrides process_config_with_overrides"},
    "utils.packed_seq_utils": {"data.packed_batch": "get_packed_seq_params"},
    "utils.sig_utils": {"process.signal_handler": "DistributedSignalHandler"},
    "utils.theoretical_memory_utils": {"reporting.theoretical_memory": "report_theoretical_memory"},
    "utils.train_utils": {
        "step": "maybe_inject_state needs_global_state_injection prepare_forward_step_func",
        "models.hooks": "LinearForLastLayer ModelHook ModelList _ensure_model_list _freeze_parameter_if_present"
        " _register_linear_for_last_layer_mapping create_value_head_hook freeze_moe_router make_value_model",
        "models.param_norm": "calc_dtensor_params_l2_norm calc_params_l2_norm param_is_not_shared",
        "process.device": "logical_and_across_model_parallel_group reduce_max_memory_across_pp_group"
        " reduce_max_stat_across_model_parallel_group",
        "profiling": "start_memory_history_recording",
        "reporting.loggers": "_MoeMetricFanoutWriter _build_moe_metric_writer",
        "reporting.reports": "MEMORY_KEYS flops_per_step report_l2_norm_grad report_memory report_runtime"
        " report_throughput",
        "reporting.training_log": "training_log",
        _HERE: "logger",
    },
}

_CONVERSION = (
    "Megatron-Bridge converts from and to Hugging Face; give its checkpoints to checkpoint.pretrained_checkpoint"
)
_ARCHITECTURES = (
    "single architectures have no classes here; GPTModelProvider, MLAModelProvider, HybridModelProvider and"
    " MambaModelProvider of cloudai_mbridge.models have their fields"
)
_OMEGACONF = (
    "training.utils.omegaconf_utils.process_config_with_overrides applies a file and overrides without OmegaConf"
)
_MULTIMODAL = "models of vision and audio are not trained here; use Megatron-Bridge"
_OWN_LOOP = "the loop builds and drives it; configure it, or use a callback"
_OWN_CHECKPOINTS = "checkpoints of adapters are the loop's; checkpoint.custom_manager_class takes one of your own"
_MODELOPT = "quantization and distillation with ModelOpt are Megatron-Bridge's; the loop trains their checkpoints"

# Module or name below this package, and all names below it -> replacement; the longest entry counts
ABSENT: dict[str, str] = {
    "AutoBridge": _CONVERSION,
    "data": "the loop's data are training.config's data sets, or a DatasetProvider of your own",
    "data.builders.DirectHFSFTDatasetConfig": "GPTSFTDatasetConfig with hf_dataset reads the same rows from files",
    "data.builders.MockVLMSFTDatasetConfig": _MULTIMODAL,
    "data.builders.EnergonDatasetConfig": _MULTIMODAL,
    "data.builders.energon": _MULTIMODAL,
    "data.energon": _MULTIMODAL,
    "data.loaders": _OWN_LOOP,
    "data.megatron_mimo": _MULTIMODAL,
    "data.utils": "training.setup builds the data of config.dataset; validation.skip_train = True evaluates alone",
    "diffusion": "diffusion models are Megatron-Bridge's",
    "inference": "inference is Megatron-Bridge's; the loop trains and evaluates",
    "models": _ARCHITECTURES,
    "models.AutoBridge": _CONVERSION,
    "models.conversion": _CONVERSION,
    "models.decorators": "it only serves conversion; use torch.distributed.run",
    "models.distillation_provider": _MODELOPT,
    "models.gpt_provider.transformer_engine_layer_spec": "default_layer_spec takes Transformer Engine's layers",
    "models.hf_pretrained": _CONVERSION,
    "models.megatron_mimo": _MULTIMODAL,
    "models.model_provider": "a provider builds its model with provide(); training.setup.build_model wraps it",
    "peft": "adapters are configured by LoRA, DoRA and CanonicalLoRA; training.setup applies them",
    "peft.lora.LoRAMerge": "python -m cloudai_mbridge.training.merge_adapters merges a checkpoint",
    "peft.utils": "python -m cloudai_mbridge.training.merge_adapters merges; saved checkpoints are the loop's",
    "perf_recipes": "mbridge list recipes prints the shipped recipes; a TOML test selects a preset with gpu_type",
    "recipes": "recipes are TOML files here; `mbridge list recipes` prints the families with functions",
    "recipes.utils": "write the fields of the configuration",
    "training.checkpointing._generate_model_state_dict": _OWN_CHECKPOINTS,
    "training.checkpointing.apply_peft_adapter_filter_to_state_dict": _OWN_CHECKPOINTS,
    "training.config.apply_environment_variables": "pretrain and finetune set config.env_vars",
    "training.distill": _MODELOPT,
    "training.eval_context_parallel_rebinding": "evaluations have the layout of training",
    "training.flex_dispatcher_backend": "set model.moe_flex_dispatcher_backend and moe_token_dispatcher_type",
    "training.initialize.destroy_global_state": "every pretrain and finetune has a state of its own",
    "training.initialize.set_jit_fusion_options": "training.initialize.initialize applies the device's abilities",
    "training.llava_step": _MULTIMODAL,
    "training.megatron_mimo_parallel_utils": _MULTIMODAL,
    "training.megatron_mimo_step": _MULTIMODAL,
    "training.model_load_save": _CONVERSION,
    "training.post_training": _MODELOPT,
    "training.pretrain_megatron_mimo": _MULTIMODAL,
    "training.utils.moe_token_drop": "set model.moe_expert_capacity_factor and moe_pad_expert_input_to_capacity",
    "training.utils.omegaconf_utils.create_omegaconf_dict_config": _OMEGACONF,
    "training.utils.omegaconf_utils.parse_hydra_overrides": _OMEGACONF,
    "training.utils.visual_inputs": _MULTIMODAL,
    "training.vlm_step": _MULTIMODAL,
    "utils": "it has no counterpart here",
}


def served_module(full_name: str, homes: Mapping[str, str]) -> ModuleType:
    """Make a module of names that live elsewhere: `homes` maps the full name of each home to its names."""
    module = ModuleType(full_name, "The names of Megatron-Bridge's module; `upstream` lists their homes.")
    home_of = {each: home for home, names in homes.items() for each in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise missing(full_name, name)
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    functions = {"__getattr__": find, "__dir__": lambda: sorted({*vars(module), *home_of})}  # as Python calls them
    vars(module).update(functions, __all__=sorted(home_of))
    return module


def missing(module: str, name: str) -> ImportError | AttributeError:
    """Return the exception for a name that a module lacks: an ImportError in one line if it is absent on purpose.

    A module below it that has not been imported yet is looked for by Python after an AttributeError.
    """
    is_own = name.startswith("__")
    is_module = not is_own and hasattr(sys.modules[module], "__path__") and find_spec(f"{module}.{name}") is not None
    line = None if is_own or is_module else refusal(f"{module}.{name}")
    return ImportError(line) if line else AttributeError(f"module {module!r} has no attribute {name!r}")


def refusal(full: str) -> str | None:
    """Return the one line for the full name of something absent; None: unknown."""
    parts = full.split(".")[1:]
    found = (ABSENT.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    text = next((text for text in found if text), None)
    return f"{full} is absent on purpose: {text}" if text else None


def serve(package: str) -> None:
    """Make the modules importable below `package`, which is being imported."""
    for name, homes in MODULES.items():
        parent, _, last = f"{package}.{name}".rpartition(".")
        module = served_module(f"{package}.{name}", {f"{package}.{home}": names for home, names in homes.items()})
        if any(other.startswith(f"{name}.") for other in MODULES):
            module.__path__ = []  # a package: Python looks for other modules below it, too
        sys.modules[f"{package}.{name}"] = module
        setattr(sys.modules[parent], last, module)
