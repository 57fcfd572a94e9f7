"""Modules of Megatron-Bridge whose contents have another place here, served under their names for users' scripts.

`from cloudai_mbridge.training.utils.train_utils import training_log` works as after renaming the package in a script.
A name is imported from its home when it is first asked for.
"""

import sys
from importlib import import_module
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
        "resilience.nvrx_straggler": "NVRxStragglerDetectionManager check_nvrx_straggler_detection"
        " safe_shutdown_nvrx_straggler_manager"
    },
    "utils": {},
    "utils.checkpoint_utils": {
        "checkpointing.layout": "checkpoint_exists get_checkpoint_name get_checkpoint_run_config_filename"
        " get_checkpoint_train_state_filename",
        _HERE: "CONFIG_FILE TRACKER_PREFIX TRAIN_STATE_FILE ensure_directory_exists file_exists"
        " get_checkpoint_tracker_filename read_run_config read_train_state",
    },
    "utils.config_utils": {"config.container": "_ConfigContainerBase"},
    "utils.flop_utils": {_HERE: "num_floating_point_operations"},
    "utils.log_utils": {
        "reporting.progress_log": "append_to_progress_log",
        "loop.exits": "barrier_and_log",
        _HERE: "setup_logging",
    },
    "utils.omegaconf_utils": {_HERE: "OverridesError apply_overrides process_config_with_overrides"},
    "utils.packed_seq_utils": {"data.packed_batch": "get_packed_seq_params"},
    "utils.sig_utils": {"process.signal_handler": "DistributedSignalHandler"},
    "utils.theoretical_memory_utils": {"reporting.theoretical_memory": "report_theoretical_memory"},
    "utils.train_utils": {
        "loop.forward_step": "maybe_inject_state needs_global_state_injection prepare_forward_step_func",
        "models.hooks": "LinearForLastLayer ModelHook ModelList _ensure_model_list _freeze_parameter_if_present"
        " _register_linear_for_last_layer_mapping create_value_head_hook freeze_moe_router make_value_model",
        "models.param_norm": "calc_dtensor_params_l2_norm calc_params_l2_norm param_is_not_shared",
        "process.collectives": "logical_and_across_model_parallel_group reduce_max_memory_across_pp_group"
        " reduce_max_stat_across_model_parallel_group",
        "profiling.memory_history": "start_memory_history_recording",
        "reporting.moe_metrics": "_MoeMetricFanoutWriter _build_moe_metric_writer",
        "reporting.reports": "MEMORY_KEYS report_l2_norm_grad report_memory report_runtime report_throughput",
        "reporting.step_flops": "flops_per_step",
        "reporting.training_log": "training_log",
        _HERE: "logger",
    },
}


class _ServedModule(ModuleType):
    """A module of names that live elsewhere."""

    def __init__(self, package: str, name: str) -> None:
        super().__init__(f"{package}.{name}", "The names of Megatron-Bridge's module; `training.upstream` lists homes.")
        homes = MODULES[name].items()
        self._home_of = {each: f"{package}.{home}" for home, names in homes for each in names.split()}
        self.__all__ = sorted(self._home_of)

    def __getattr__(self, name: str) -> Any:
        if name not in self._home_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self._home_of[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def serve(package: str) -> None:
    """Make the modules importable below `package`, which is being imported."""
    for name in MODULES:
        parent, _, last = f"{package}.{name}".rpartition(".")
        sys.modules[f"{package}.{name}"] = module = _ServedModule(package, name)
        setattr(sys.modules[parent], last, module)
