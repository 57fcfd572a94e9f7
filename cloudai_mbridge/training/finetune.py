"""Fine-tune: train on from the weights of a checkpoint."""

from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.training.callbacks import Callback, CallbackManager
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.pretrain import pretrain


def finetune(
    config: ConfigContainer, forward_step_func: Any, callbacks: Sequence[Callback] | CallbackManager | None = None
) -> None:
    """Train on from `checkpoint.pretrained_checkpoint`, or from `checkpoint.load`. Every rank calls it.

    callbacks: see `training.callbacks`.

    AssertionError: neither is set.
    ConfigError: as `pretrain`.
    """
    assert config.checkpoint.pretrained_checkpoint or config.checkpoint.load, (
        "fine-tuning needs weights to begin with: set checkpoint.pretrained_checkpoint or checkpoint.load"
    )
    pretrain(config, forward_step_func, callbacks)
