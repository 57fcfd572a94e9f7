"""The public names of the loop, their parameters and defaults: what code written against the reference relies on."""

import importlib
import inspect
from typing import Any

import pytest

from tests.cases import every

pytest.importorskip("torch")

# module -> name -> parameters in order, with defaults after "="
SIGNATURES: dict[str, dict[str, str]] = {
    "train": {
        "train": "forward_step_func, model, optimizer, scheduler, train_data_iterator, valid_data_iterator,"
        " global_state, checkpointing_context, process_non_loss_data_func=None, non_loss_data_func=None,"
        " callback_manager=None",
        "train_step": "forward_step_func, data_iterator, model, optimizer, scheduler, global_state",
        "post_training_step_callbacks": "model, num_floating_point_operations_since_last_log_event, straggler_timer,"
        " iteration, prof, config, should_toggle_forward_pre_hook, nsys_nvtx_context=None",
        "should_disable_forward_pre_hook": "use_megatron_fsdp, use_distributed_optimizer, overlap_param_gather",
        "enable_forward_pre_hook": "model",
        "disable_forward_pre_hook": "model, param_sync=True",
        "get_start_time_from_progress_log": "cfg",
        "compute_throughputs_and_append_to_progress_log": "state, num_floating_point_operations_so_far",
        "save_checkpoint_and_time": "state, model, optimizer, opt_param_scheduler,"
        " num_floating_point_operations_so_far, checkpointing_context, non_persistent_ckpt=False,"
        " train_data_iterator=None",
        "checkpoint_and_decide_exit": "state, model, optimizer, opt_param_scheduler,"
        " num_floating_point_operations_so_far, checkpointing_context, train_data_iterator",
        "_finish_train": "global_state",
        "_should_skip_and_handle_iteration": "global_state, train_data_iterator",
        "_dummy_train_step": "global_state, train_data_iterator",
        "_handle_mxfp8_param_buffer_copy": "optimizer, reuse_grad_buf_for_mxfp8_param_ag, overlap_param_gather",
    },
    "utils.train_utils": {
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
        "training_log": "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale,"
        " report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, config, global_state,"
        " history_wct, model, pg_collection=None, log_max_attention_logit=None, loaded_iteration=0, seq_length=None",
        "report_memory": "memory_keys",
        "report_l2_norm_grad": "model",
        "report_runtime": "train_state, start_time, seq_length, train_iters, time_unit='seconds'",
        "report_throughput": "train_config, iteration, seq_length, history_wct, window_size",
        "prepare_forward_step_func": "forward_step_func, state",
        "needs_global_state_injection": "forward_step_func",
        "maybe_inject_state": "forward_step_func, state, needs_injection=None",
    },
    "pretrain": {"pretrain": "config, forward_step_func, callbacks=None"},
    "finetune": {"finetune": "config, forward_step_func, callbacks=None"},
    "callbacks": {
        "normalize_callbacks": "callbacks",
        "should_fire": "callback_manager, event_name",
        "CallbackManager.add": "self, callback",
        "CallbackManager.register": "self, event_name, fn",
        "CallbackManager.list_callbacks": "self, event_name",
        "CallbackManager.has_callbacks": "self, event_name",
        "CallbackManager.fire": "self, event_name, context",
        "CallbackContext": "state, model, user_state=<factory>, optimizer=None, scheduler=None, loss_dict=None,"
        " grad_norm=None, skipped_iter=None, total_loss_dict=None",
    },
    "losses": {
        "create_masked_next_token_loss_function": "loss_mask, check_for_nan_in_loss, check_for_spiky_loss",
        "masked_next_token_loss": "loss_mask, output_tensor, check_for_nan_in_loss=True, check_for_spiky_loss=False",
        "masked_token_loss": "loss_mask, output_tensor, check_for_nan_in_loss=True, check_for_spiky_loss=False",
    },
}
DATA = ("logger", "ModelList", "ModelHook", "MEMORY_KEYS")
RETURNS: dict[str, Any] = {
    "calc_params_l2_norm": float,
    "reduce_max_stat_across_model_parallel_group": float | None,
    "logical_and_across_model_parallel_group": bool,
    "training_log": bool,
    "needs_global_state_injection": bool,
    "_register_linear_for_last_layer_mapping": None,
    "param_is_not_shared": bool,
}
MODULES = ("eval", "checkpointing", "profiling", "initialize", "setup", "state", "gpt_step")


def _load(module: str, name: str) -> Any:
    found: Any = importlib.import_module(f"cloudai_mbridge.training.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _parameters(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@every(("module", "name"), [(module, name) for module, names in SIGNATURES.items() for name in names])
def test_signature(module: str, name: str) -> None:
    assert _parameters(_load(module, name)) == SIGNATURES[module][name]


@every("name", RETURNS)
def test_return_types(name: str) -> None:
    assert inspect.signature(_load("utils.train_utils", name)).return_annotation == RETURNS[name]


def test_all_names_of_the_helpers() -> None:
    helpers = importlib.import_module("cloudai_mbridge.training.utils.train_utils")
    names = {name.partition(".")[0] for name in SIGNATURES["utils.train_utils"]} | {*DATA}
    assert names <= set(helpers.__all__) <= set(dir(helpers))
    assert helpers.logger.name == "cloudai_mbridge.training.utils.train_utils"


@every("module", MODULES)
def test_module(module: str) -> None:
    importlib.import_module(f"cloudai_mbridge.training.{module}")


def test_the_forward_step_takes_the_state_first() -> None:
    parameters = list(inspect.signature(_load("gpt_step", "forward_step")).parameters.values())
    assert [p.name for p in parameters][1:] == ["data_iterator", "model", "return_schedule_plan"]
    assert parameters[0].name in ("state", "global_state")
    assert parameters[-1].default is False


def test_the_state_has_what_the_reference_has() -> None:
    state = _load("state", "GlobalState")()
    names = (
        "timers train_state tensorboard_logger wandb_logger mlflow_logger comet_logger tokenizer signal_handler"
        " straggler_timer nvrx_straggler_manager energy_monitor fault_tolerance_state rank_monitor_client"
        " async_calls_queue start_time reset_for_restart"
    )
    missing = [name for name in names.split() if not hasattr(type(state), name) and name not in vars(state)]
    assert not missing
    with pytest.raises(AttributeError, match="cfg is not set"):
        _ = state.cfg


def test_the_train_state_comes_back() -> None:
    import torch

    kind = _load("state", "TrainState")
    state = kind(3, 24, 8, 16, 2**70, True, False, True)
    saved = state.state_dict()
    assert {name: value.dtype for name, value in saved.items()} == {
        **dict.fromkeys(("step", "consumed_train_samples"), torch.int64),
        **dict.fromkeys(("skipped_train_samples", "consumed_valid_samples"), torch.int64),
        "floating_point_operations_so_far": torch.float64,
        **dict.fromkeys(("do_train", "do_valid", "do_test"), torch.bool),
    }
    assert all(value.dim() == 0 for value in saved.values())
    again = kind()
    again.load_state_dict(saved)
    assert again == state
    del saved["step"]
    untouched = kind()
    with pytest.raises(KeyError, match="step"):
        untouched.load_state_dict(saved)
    assert untouched == kind()
