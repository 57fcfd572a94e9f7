"""A checkpoint manager of the user's own saves, loads and finalizes in place of the package's functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.checkpointing import (
    CheckpointManager,
    DefaultCheckpointManager,
    create_checkpoint_manager,
)
from cloudai_mbridge.training.config import CheckpointConfig
from cloudai_mbridge.training.errors import ConfigError

SCRIPT = """
import sys
import types
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.checkpointing import DefaultCheckpointManager
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain

class Telling(DefaultCheckpointManager):
    def save(self, ctx, callback_manager):
        super().save(ctx, callback_manager)
        print("SAVED", ctx.state.train_state.step)

    def load(self, ctx):
        found = super().load(ctx)
        print("LOADED", found[0])
        return found

    def finalize_async_saves(self, state, blocking=False, terminate=False):
        super().finalize_async_saves(state, blocking, terminate)
        if terminate:
            print("FINALIZED")

if __name__ == "__main__":
    sys.modules["mine"] = module = types.ModuleType("mine")
    module.Telling = Telling
    manager = CallbackManager()
    manager.register("on_checkpoint_save", lambda context: print("TOLD", context.state.train_state.step))
    pretrain(ConfigContainer.from_yaml("config.json"), forward_step, manager)
"""


def test_the_loop_calls_it(tiny: Callable[..., Any], ranks: Any, tmp_path: Path) -> None:
    saving = {"save": "ckpt", "load": "ckpt", "save_interval": 1, "custom_manager_class": "mine.Telling"}
    sections: dict[str, Any] = {
        "train": {"train_iters": 3, "exit_interval": 2},
        "model": {"num_layers": 1},
        "checkpoint": saving,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    words = ("SAVED", "LOADED", "TOLD", "FINALIZED")
    first = [line for line in ranks(1, SCRIPT).stdout.splitlines() if line.startswith(words)]
    assert first == ["TOLD 1", "SAVED 1", "TOLD 2", "SAVED 2", "FINALIZED"]
    del sections["train"]["exit_interval"]
    saving["async_save"] = True
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    second = [line for line in ranks(1, SCRIPT).stdout.splitlines() if line.startswith(words)]
    assert second == ["LOADED 2", "SAVED 3", "TOLD 3", "FINALIZED"]


class Without:
    """No manager."""


def test_what_it_has_to_be() -> None:
    made = create_checkpoint_manager(CheckpointConfig())
    assert isinstance(made, DefaultCheckpointManager)
    assert isinstance(made, CheckpointManager)
    for path, words in {
        "Alone": "'its module' is not imported; import it in the script that trains",
        "no.such.Manager": "'no.such' is not imported",
        f"{__name__}.Other": "no such class",
        f"{__name__}.Without": "has no method save, load, finalize_async_saves; see",
    }.items():
        with pytest.raises(ConfigError, match=f"custom_manager_class = '{path}'.*{words}"):
            create_checkpoint_manager(CheckpointConfig(custom_manager_class=path))


def test_a_subclass_may_replace_what_all_saves_share() -> None:
    """As with Megatron-Bridge's manager: `_context` is an attribute, and `checkpointing_context` a property."""

    class Reads(DefaultCheckpointManager):
        @property
        def checkpointing_context(self) -> dict[str, Any]:
            return {**self._context, "mine": 1}

    assert Reads(CheckpointConfig()).checkpointing_context == {"mine": 1}
    assert isinstance(Reads(CheckpointConfig()), CheckpointManager)
