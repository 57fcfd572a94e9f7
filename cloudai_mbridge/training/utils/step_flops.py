"""The model FLOPs of the step that was run, over all ranks: they follow its batch and its sequence lengths."""

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

from cloudai_mbridge.training.utils.flops import flops_per_token


def flops_per_step(state: Any, seq_length: int | None = None) -> int:
    """Return the model FLOPs of one step at the current batch size, which a ramp-up changes.

    The lengths are, in this order: those that the forward step has counted on this rank, as `state.seqlen_sum` and
    `state.seqlen_squared_sum` (over the real sub-sequences of the step's micro-batches; 0 or missing: not counted);
    `seq_length`; the model's.
    """
    model = state.cfg.model
    if counted := getattr(state, "seqlen_sum", 0):
        chunks = model.virtual_pipeline_model_parallel_size or 1  # each has counted the same micro-batches
        tokens = counted * mpu.get_data_parallel_world_size() / chunks
        return int(flops_per_token_at(model, state.seqlen_squared_sum / counted) * tokens)
    length = int(model.seq_length) if seq_length is None else seq_length
    return flops_of_batch(model, get_current_running_global_batch_size(), length)


def flops_of_batch(model: Any, batch_size: int, seq_length: int) -> int:
    """Return the model FLOPs to train on `batch_size` sequences of `seq_length` tokens."""
    return flops_per_token_at(model, seq_length) * batch_size * seq_length


def flops_per_token_at(model: Any, seq_length: float) -> int:
    """Return the model FLOPs to train on one token of a sequence of this length."""
    mtp_num_layers = getattr(model, "mtp_num_layers", None) or 0
    return flops_per_token(_AtLength(model, seq_length), mtp_num_layers)


class _AtLength:
    """A model configuration with another sequence length."""

    def __init__(self, model: Any, seq_length: float) -> None:
        self._model, self.seq_length = model, seq_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
