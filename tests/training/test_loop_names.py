"""The public names of the loop that its own modules share, and its state.

Their parameters and defaults are compared with Megatron-Bridge's own: tests/interop/test_names.py.
"""

import importlib
import inspect
from typing import Any

import pytest

from tests.cases import every

pytest.importorskip("torch")

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
MODULES = ("eval", "checkpointing", "profiling", "initialize", "setup", "state", "gpt_step", "pretrain", "finetune")


def _load(module: str, name: str) -> Any:
    found: Any = importlib.import_module(f"cloudai_mbridge.training.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@every("name", RETURNS)
def test_return_types(name: str) -> None:
    assert inspect.signature(_load("utils.train_utils", name)).return_annotation == RETURNS[name]


def test_all_names_of_the_helpers() -> None:
    helpers = importlib.import_module("cloudai_mbridge.training.utils.train_utils")
    assert {*DATA, *RETURNS} <= set(helpers.__all__) <= set(dir(helpers))
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
