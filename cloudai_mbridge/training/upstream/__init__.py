"""Modules of Megatron-Bridge whose contents have another place here, served under their names for users' scripts.

`from cloudai_mbridge.training.utils.train_utils import training_log` works as after renaming the package in a script.
A name is imported from its home on first access.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from cloudai_mbridge.training.upstream.absent import refusal

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
    "utils.flop_utils": {_HERE: "num_floating_point_operations"},
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
        "process.collectives": "logical_and_across_model_parallel_group reduce_max_memory_across_pp_group"
        " reduce_max_stat_across_model_parallel_group",
        "profiling": "start_memory_history_recording",
        "reporting.loggers": "_MoeMetricFanoutWriter _build_moe_metric_writer",
        "reporting.reports": "MEMORY_KEYS flops_per_step report_l2_norm_grad report_memory report_runtime"
        " report_throughput",
        "reporting.training_log": "training_log",
        _HERE: "logger",
    },
}


class ServedModule(ModuleType):
    """A module of names that live elsewhere: `homes` maps the full name of each home to its names."""

    def __init__(self, full_name: str, homes: Mapping[str, str]) -> None:
        super().__init__(full_name, "The names of Megatron-Bridge's module; `upstream` lists their homes.")
        self._home_of = {each: home for home, names in homes.items() for each in names.split()}
        self.__all__ = sorted(self._home_of)

    def __getattr__(self, name: str) -> Any:
        if name not in self._home_of:
            raise missing(self.__name__, name)
        value = getattr(import_module(self._home_of[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def missing(module: str, name: str) -> ImportError | AttributeError:
    """Return the exception for a name that a module lacks: an ImportError in one line if it is absent on purpose.

    A module below it that has not been imported yet is looked for by Python after an AttributeError.
    """
    is_own = name.startswith("__")
    is_module = not is_own and hasattr(sys.modules[module], "__path__") and find_spec(f"{module}.{name}") is not None
    line = None if is_own or is_module else refusal(f"{module}.{name}")
    return ImportError(line) if line else AttributeError(f"module {module!r} has no attribute {name!r}")


def serve(package: str) -> None:
    """Make the modules importable below `package`, which is being imported."""
    for name, homes in MODULES.items():
        parent, _, last = f"{package}.{name}".rpartition(".")
        module = ServedModule(f"{package}.{name}", {f"{package}.{home}": names for home, names in homes.items()})
        if any(other.startswith(f"{name}.") for other in MODULES):
            module.__path__ = []  # a package: Python looks for other modules below it, too
        sys.modules[f"{package}.{name}"] = module
        setattr(sys.modules[parent], last, module)
