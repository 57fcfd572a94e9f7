"""Names and signatures are those of Megatron-Bridge's page, with which users' code was written."""

import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.utils import train_utils

SIGNATURES = {
    "LinearForLastLayer": "input_size, output_size, sequence_parallel",
    "LinearForLastLayer.forward": "self, input_, weight=None, runtime_gather_output=None",
    "create_value_head_hook": "hidden_size, sequence_parallel, output_size=1",
    "make_value_model": "hidden_size, sequence_parallel",
    "freeze_moe_router": "model",
    "_ensure_model_list": "model",
    "_freeze_parameter_if_present": "module, name",
    "_register_linear_for_last_layer_mapping": "",
    "start_memory_history_recording": "profiling",
    "param_is_not_shared": "param",
    "calc_params_l2_norm": "model, model_config, use_megatron_fsdp=False, force_create_fp32_copy=False",
    "calc_dtensor_params_l2_norm": "params",
    "reduce_max_stat_across_model_parallel_group": "stat, mp_group",
    "logical_and_across_model_parallel_group": "input, mp_group",
    "reduce_max_memory_across_pp_group": "memory_report, pp_group",
    "_MoeMetricFanoutWriter": "tb_writer, comet_logger, mlflow_logger",
    "_MoeMetricFanoutWriter._sanitize": "value",
    "_MoeMetricFanoutWriter.add_scalar": "self, name, value, iteration",
    "_build_moe_metric_writer": "tb_writer, comet_logger, mlflow_logger",
    "training_log": (
        "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale, report_memory_flag, "
        "skipped_iter, grad_norm, params_norm, num_zeros_in_grad, config, global_state, history_wct, model, "
        "pg_collection=None, log_max_attention_logit=None, loaded_iteration=0, seq_length=None"
    ),
    "report_memory": "memory_keys",
    "report_l2_norm_grad": "model",
    "report_runtime": "train_state, start_time, seq_length, train_iters, time_unit='seconds'",
    "report_throughput": "train_config, iteration, seq_length, history_wct, window_size",
    "prepare_forward_step_func": "forward_step_func, state",
    "needs_global_state_injection": "forward_step_func",
    "maybe_inject_state": "forward_step_func, state, needs_injection=None",
}
RETURNS = {
    "calc_params_l2_norm": float,
    "reduce_max_stat_across_model_parallel_group": float | None,
    "logical_and_across_model_parallel_group": bool,
    "training_log": bool,
    "needs_global_state_injection": bool,
    "_register_linear_for_last_layer_mapping": None,
    "param_is_not_shared": bool,
}


def _named(path: str) -> Any:
    found: Any = train_utils
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature(name: str) -> None:
    parameters = inspect.signature(_named(name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(shown) == SIGNATURES[name]


@pytest.mark.parametrize("name", RETURNS)
def test_what_is_returned(name: str) -> None:
    assert inspect.signature(_named(name)).return_annotation == RETURNS[name]


def test_the_names() -> None:
    names = {name.partition(".")[0] for name in SIGNATURES} | {"logger", "ModelList", "ModelHook", "MEMORY_KEYS"}
    assert names <= set(train_utils.__all__)
    assert train_utils.logger.name == "cloudai_mbridge.training.utils.train_utils"
