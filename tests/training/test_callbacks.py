"""Callbacks: registration, and when the loop calls them on real runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from cloudai_mbridge.training.callbacks import (
    VALID_EVENTS,
    Callback,
    CallbackContext,
    CallbackManager,
    fire,
    normalize_callbacks,
    should_fire,
)
from tests.cases import every


class Two(Callback):
    """Overrides two events."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def on_train_start(self, context: CallbackContext) -> None:
        self.seen.append("start")

    def on_eval_end(self, context: CallbackContext) -> None:
        self.seen.append("eval")


def test_a_callback_is_asked_for_what_it_overrides() -> None:
    manager = CallbackManager()
    manager.add(Two([]))
    assert [event for event in sorted(manager.events) if manager.has_callbacks(event)] == [
        "on_eval_end",
        "on_train_start",
    ]
    assert len(manager.list_callbacks("on_train_start")) == 1
    assert manager.list_callbacks("on_train_end") == []


def test_they_are_called_in_order_and_share_a_table() -> None:
    manager, seen = CallbackManager(), list[str]()
    manager.register("on_train_start", lambda context: context.user_state.update(n=1))
    manager.add([Two(seen), Two(seen)])
    manager.register("on_train_start", lambda context: seen.append(f"n={context.user_state['n']}"))
    fire("on_train_start", manager, None, [])  # type: ignore[arg-type]
    assert seen == ["start", "start", "n=1"]
    assert manager.user_state == {"n": 1}


def test_unknown_events_are_refused_and_errors_go_to_the_caller() -> None:
    manager = CallbackManager()
    with pytest.raises(ValueError, match=r"Unknown event 'on_step'.*: on_checkpoint_save, on_data_init"):
        manager.register("on_step", print)
    with pytest.raises(ValueError, match="Unknown event"):
        manager.list_callbacks("on_step")
    manager.register("on_train_end", lambda context: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.fire("on_train_end", CallbackContext(None, []))  # type: ignore[arg-type]


def test_what_may_be_passed() -> None:
    manager = CallbackManager()
    assert normalize_callbacks(None) is None
    assert normalize_callbacks(manager) is manager
    made = normalize_callbacks([Two([])])
    assert should_fire(made, "on_eval_end")
    assert not should_fire(made, "on_train_end")
    assert not should_fire(None, "on_eval_end")
    assert len(VALID_EVENTS) == 14


@every("callback", [print, object(), "x", Two, lambda context: None, [Two([]), print]])
def test_what_would_never_be_called_is_refused(sentence: Sentence, callback: Any) -> None:
    for several in ([callback], callback):
        with pytest.raises(TypeError) as caught:
            normalize_callbacks(several)
        sentence(caught)
    manager = CallbackManager()
    manager.add(Callback())
    assert not any(map(manager.has_callbacks, VALID_EVENTS))


SCRIPT = """
import json, sys
import torch.distributed as dist
from cloudai_mbridge.training.callbacks import Callback, CallbackManager, VALID_EVENTS
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.finetune import finetune
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain

seen = []


def note(event):
    def function(context):
        c = context.user_state["calls"] = context.user_state.get("calls", 0) + 1
        seen.append([event, context.state.train_state.step, all(m.training for m in context.model),
                     context.optimizer is not None and context.scheduler is not None,
                     sorted(context.loss_dict or {}), context.grad_norm is not None, context.skipped_iter,
                     sorted(context.total_loss_dict or {}), c])
    return function


if __name__ == "__main__":
    manager = CallbackManager()
    for event in VALID_EVENTS:
        manager.register(event, note(event))
    config = ConfigContainer.from_dict(json.load(open("config.json")))
    code = None
    try:
        {"pretrain": pretrain, "finetune": finetune}[sys.argv[1]](config, forward_step, manager)
    except SystemExit as error:
        code = error.code
    with open(f"seen.{config.dist.local_rank or 0}.{__import__('os').environ.get('RANK', 0)}.json", "w") as file:
        json.dump([code, seen], file)
"""
TRAIN = {"train_iters": 3}
STEP = ["on_train_step_start", "on_train_step_end"]


def _seen(tmp_path: Any, rank: int = 0) -> tuple[int | None, list[list[Any]]]:
    (path,) = tmp_path.glob(f"seen.*.{rank}.json")
    code, seen = json.loads(path.read_text())
    return code, seen


def _kind(when: str) -> list[str]:
    return [f"on_{when}_start", *[f"on_{when}_step_start", f"on_{when}_step_end"] * 2, f"on_{when}_end"]


@pytest.mark.kept_ranks
def test_the_order_of_a_run_with_everything(tiny: Callable[..., Any], ranks: Any, tmp_path: Any) -> None:
    """Two stages: the losses are on the last, the calls on both."""
    sections = {
        "model": {"num_layers": 2, "pipeline_model_parallel_size": 2},
        "train": TRAIN,
        "validation": {"eval_iters": 2, "eval_interval": 2},
        "checkpoint": {"save": "ckpt", "save_interval": 2},
        "dataset": {"split": "8,1,1"},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    ranks(2, SCRIPT, "pretrain")
    for rank in (0, 1):
        code, seen = _seen(tmp_path, rank)
        assert code is None
        assert [each[0] for each in seen] == [
            *("on_data_init_start", "on_train_start", *STEP, *STEP),
            *(*_kind("eval"), "on_checkpoint_save", *STEP, "on_train_end", "on_checkpoint_save"),
            *(*_kind("eval"), *_kind("test")),
        ]
        assert [each[-1] for each in seen] == list(range(1, len(seen) + 1))
        assert [each[1] for each in seen if each[0] == "on_train_step_end"] == [0, 1, 2]
        losses = ["lm loss"] * rank
        for event, _, is_training, has_optimizer, step_losses, has_norm, skipped, totals, _ in seen:
            is_evaluation = event.startswith(("on_eval", "on_test"))
            assert is_training is not is_evaluation, event
            assert has_optimizer is not is_evaluation, event
            at_end = event == "on_train_step_end"
            assert (step_losses, has_norm, skipped) == ((losses, True, False) if at_end else ([], False, None)), event
            assert totals == (losses if event in ("on_eval_end", "on_test_end") else []), event


SAVES = """
import json
from pathlib import Path
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain

if __name__ == "__main__":
    manager, latest = CallbackManager(), []
    tracker = Path("ckpt/latest_checkpointed_iteration.txt")

    def save(context):
        assert context.optimizer is not None and context.scheduler is not None
        latest.append(tracker.read_text() if tracker.exists() else None)

    manager.register("on_checkpoint_save", save)
    pretrain(ConfigContainer.from_dict(json.load(open("config.json"))), forward_step, manager)
    Path("latest.json").write_text(json.dumps(latest))
"""


@pytest.mark.kept_ranks
@pytest.mark.parametrize("async_save", [False, True])
def test_a_saved_checkpoint_is_complete(async_save: bool, tiny: Callable[..., Any], ranks: Any, tmp_path: Any) -> None:
    saving = {"save": "ckpt", "save_interval": 1, "async_save": async_save}
    sections = {"train": {"train_iters": 3}, "model": {"num_layers": 1}, "checkpoint": saving}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    ranks(1, SAVES)
    assert json.loads((tmp_path / "latest.json").read_text()) == ["1", "2", "3"]


@pytest.mark.kept_ranks
def test_what_it_raises_is_not_a_failed_save(tiny: Callable[..., Any], ranks: Any, tmp_path: Any) -> None:
    saving = {"save": "ckpt", "save_interval": 1, "async_save": True}
    sections = {"train": {"train_iters": 3}, "model": {"num_layers": 1}, "checkpoint": saving}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    failing = SAVES.replace("latest.append(", "raise KeyError(").replace("    pretrain(", "    try: pretrain(", 1)
    failing = failing.replace('    Path("latest', "    except KeyError: latest = 'its own'\n    Path(\"latest")
    ranks(1, failing)
    assert json.loads((tmp_path / "latest.json").read_text()) == "its own"


def test_the_end_of_a_run_that_leaves_early(tiny: Callable[..., Any], ranks: Any, tmp_path: Any) -> None:
    """The script imports Megatron-Core itself, as a user's does."""
    sections = {"train": {"train_iters": 9, "exit_interval": 2}, "model": {"num_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    ranks(1, "import megatron.core\n" + SCRIPT, "pretrain", is_quick=False)
    code, seen = _seen(tmp_path)
    assert code == 0
    assert [each[0] for each in seen][-3:] == [*STEP, "on_train_end"]


@pytest.mark.kept_ranks
def test_fine_tuning_takes_them_too(tiny: Callable[..., Any], ranks: Any, train: Any, tmp_path: Any) -> None:
    sections = {"train": {"train_iters": 1}, "model": {"num_layers": 1}, "checkpoint": {"save": "ckpt"}}
    train(1, sections)
    sections["checkpoint"] = {"pretrained_checkpoint": "ckpt"}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    ranks(1, SCRIPT, "finetune")
    assert [each[0] for each in _seen(tmp_path)[1]] == ["on_data_init_start", "on_train_start", *STEP, "on_train_end"]


DRAWS = """
import random
import numpy as np
import torch
import sys
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain

if __name__ == "__main__":
    manager = CallbackManager()
    for event in sys.argv[2:]:
        manager.register(event, lambda context: (torch.rand(1), np.random.rand(), random.random()))
    config = ConfigContainer.from_yaml("config.json")
    config.train.exit_interval = int(sys.argv[1])
    pretrain(config, forward_step, manager)
"""


@pytest.mark.kept_ranks
def test_what_they_draw_changes_no_dropout_of_a_resumed_run(tiny: Any, ranks: Any, tmp_path: Path) -> None:
    sections = {
        "model": {"num_layers": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "train": {"train_iters": 4, "global_batch_size": 2},
        "checkpoint": {"save": "ckpt", "load": "ckpt", "save_interval": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    whole = ranks(1, DRAWS, "4").losses
    shutil.rmtree(tmp_path / "ckpt")
    events = ("on_data_init_start", "on_train_start", "on_checkpoint_save", "on_train_end")
    assert ranks(1, DRAWS, "2", *events).losses | ranks(1, DRAWS, "4", *events).losses == whole
