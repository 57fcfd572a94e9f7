"""The order of the rows of a gated product: in a checkpoint all of the gate's, then all of the up projection's.

Layers that interleave them hold blocks of both by turns. As in Megatron-Bridge 0.6 their weights and biases are put in
order for each save and back after each load, and the optimizer's state stays in the order of the layers.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch.distributed.tensor import DTensor

from cloudai_mbridge.training.checkpointing.layout import RUN_CONFIG
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import CheckpointError, ConfigError

# Class of a layer that interleaves -> the field of the model with the rows of a block
_SIZES = {
    "TEGroupedMLP": "moe_mlp_glu_interleave_size",
    "FusedSharedExpertMLP": "moe_shared_expert_glu_interleave_size",
}
_PRODUCT = "linear_fc1."
_PARAMETER = re.compile(r"(to_wrap\.)?(weight|bias)\d*")
_Order = Callable[[torch.Tensor, int], torch.Tensor]
Trees = dict[str, dict[str, Any]]


def for_files(trees: Trees, chunks: Iterable[Any]) -> Trees:
    """Return the sharded states of chunks as a checkpoint holds them; the layers keep their weights."""
    return _ordered(trees, chunks, _apart)


def for_layers(trees: Trees, chunks: Iterable[Any]) -> Trees:
    """Return the loaded states of chunks as their layers hold them."""
    return _ordered(trees, chunks, _by_turns)


def check_optimizer(directory: str, model: Any) -> None:
    """Check that the optimizer's state of a checkpoint is in the order of this model's layers.

    Raises CheckpointError: the layers that saved it had blocks of another size. Nothing is checked without experts, or
    if `run_config.yaml` cannot be read.
    """
    if not getattr(model, "num_moe_experts", None):
        return
    try:
        saved = dict(read_yaml(Path(directory) / RUN_CONFIG)["model"])
    except (ConfigError, OSError, LookupError, TypeError, ValueError):
        return
    for field in _SIZES.values():
        there, here = saved.get(field), getattr(model, field, None)
        if there != here:
            raise CheckpointError(
                f"{directory}: was saved with model.{field} = {there!r}, in whose order of rows the state of the "
                f"optimizer is; use that, not {here!r}, or set checkpoint.load_optim=False"
            )


def _ordered(trees: Trees, chunks: Iterable[Any], order: _Order) -> Trees:
    made = {}
    for (key, tree), chunk in zip(trees.items(), chunks, strict=True):
        sizes = _sizes(chunk)
        made[key] = {
            name: value if (size := _size(name, sizes)) is None else _put(value, order, size)
            for name, value in tree.items()
        }
    return made


def _sizes(chunk: Any) -> dict[str, int]:
    """Return name of a layer, with a trailing dot -> rows of a block."""
    made = {}
    for name, module in chunk.named_modules():
        for kind in type(module).__mro__:
            size = getattr(module.config, _SIZES[kind.__name__], None) if kind.__name__ in _SIZES else None
            if size is not None and module.config.gated_linear_unit and not _is_split(module):
                made[f"{name}."] = size
    return made


def _is_split(module: torch.nn.Module) -> bool:
    """Return whether a rank holds only some rows of a matrix, as in torch's FSDP2: their order is kept."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _size(name: str, sizes: dict[str, int]) -> int | None:
    layer, _, parameter = name.rpartition(_PRODUCT)
    return sizes.get(layer) if _PARAMETER.fullmatch(parameter) else None


def _put(value: Any, order: _Order, size: int) -> Any:
    if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        return replace(value, data=_put(value.data, order, size))
    return order((value.dequantize() if is_float8tensor(value) else value).detach(), size)


def _apart(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[2f, ...] in blocks of `size` rows by turns -> the first f rows, then the others."""
    return rows.reshape(-1, 2, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _by_turns(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Undo `_apart`."""
    return rows.reshape(2, -1, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
