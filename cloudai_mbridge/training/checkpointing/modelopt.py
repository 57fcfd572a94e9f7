"""Checkpoints of models converted by NVIDIA's ModelOpt (quantization, pruning, distillation).

`modelopt_state/` in a checkpoint holds the modes in which the model was converted; per-layer state is in the layers'
extra state, next to the weights. As in Megatron-Bridge a model is converted before its weights are loaded.
"""

from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from cloudai_mbridge.training.checkpointing import layout
from cloudai_mbridge.training.checkpointing.agree import on_each_rank, on_first_rank
from cloudai_mbridge.training.checkpointing.async_save import forked_results
from cloudai_mbridge.training.checkpointing.find import Nothing, find_checkpoint
from cloudai_mbridge.training.checkpointing.verify import read_common
from cloudai_mbridge.training.errors import CheckpointError

DIRECTORY = "modelopt_state"
_DISTILLATION = "kd_loss"  # a mode without a state of its own


def convert_if_asked(config: Any, model: Any) -> None:
    """Convert a bare model as the checkpoint that the run begins from; its weights are not loaded yet. A collective.

    Raises CheckpointError: the checkpoint is missing, or not of a converted model; on every rank.
    """
    if not getattr(config.model, "restore_modelopt_state", False):
        return
    # Before the state is read: torch then takes the types from it that ModelOpt has declared safe
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import restore_sharded_modelopt_state

    directory = on_first_rank(partial(_find, config.checkpoint))
    on_each_rank(directory, lambda: restore_sharded_modelopt_state([model], directory))


def _find(config: Any) -> str:
    found = find_checkpoint(config)
    remedy = "set checkpoint.load or pretrained_checkpoint to one, or model.restore_modelopt_state=False"
    if isinstance(found, Nothing):
        raise CheckpointError(f"model.restore_modelopt_state = True: no checkpoint to restore from; {remedy}")
    state = Path(found.directory) / DIRECTORY
    modes = read_common(str(state)).get("modelopt_state_dict", ()) if layout.is_sharded_checkpoint(state) else ()
    if all(mode[0] == _DISTILLATION for mode in modes):
        raise CheckpointError(f"{found.directory}: holds no {DIRECTORY} of a converted model; {remedy}")
    return found.directory


def save_if_converted(config: Any, model: list[Any], directory: str) -> None:
    """Save the modes of a converted model next to its weights. A collective."""
    if not getattr(config.model, "restore_modelopt_state", False):
        return
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    bare = unwrap_model(model)
    with forked_results():
        on_each_rank(
            directory, lambda: save_sharded_modelopt_state(bare, directory, (config.checkpoint.ckpt_format, 1))
        )
