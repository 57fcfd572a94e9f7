"""Helpers of the training loop: logging, reports, reductions, hooks on the model.

Source of the names and signatures: Megatron-Bridge's `training.utils.train_utils`.
"""

import logging

from cloudai_mbridge.training.memory_history import start_memory_history_recording
from cloudai_mbridge.training.utils.model_hooks import ModelHook, ModelList, _ensure_model_list
from cloudai_mbridge.training.utils.moe_metrics import _build_moe_metric_writer, _MoeMetricFanoutWriter
from cloudai_mbridge.training.utils.moe_router import _freeze_parameter_if_present, freeze_moe_router
from cloudai_mbridge.training.utils.param_norm import (
    calc_dtensor_params_l2_norm,
    calc_params_l2_norm,
    param_is_not_shared,
)
from cloudai_mbridge.training.utils.reduce import (
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
)
from cloudai_mbridge.training.utils.reports import (
    MEMORY_KEYS,
    report_l2_norm_grad,
    report_memory,
    report_runtime,
    report_throughput,
)
from cloudai_mbridge.training.utils.state_injection import (
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from cloudai_mbridge.training.utils.step_flops import flops_per_step
from cloudai_mbridge.training.utils.training_log import training_log
from cloudai_mbridge.training.utils.value_head import (
    LinearForLastLayer,
    _register_linear_for_last_layer_mapping,
    create_value_head_hook,
    make_value_model,
)

logger = logging.getLogger(__name__)

__all__ = [
    "MEMORY_KEYS",
    "LinearForLastLayer",
    "ModelHook",
    "ModelList",
    "_MoeMetricFanoutWriter",
    "_build_moe_metric_writer",
    "_ensure_model_list",
    "_freeze_parameter_if_present",
    "_register_linear_for_last_layer_mapping",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "create_value_head_hook",
    "flops_per_step",
    "freeze_moe_router",
    "logger",
    "logical_and_across_model_parallel_group",
    "make_value_model",
    "maybe_inject_state",
    "needs_global_state_injection",
    "param_is_not_shared",
    "prepare_forward_step_func",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "start_memory_history_recording",
    "training_log",
]
