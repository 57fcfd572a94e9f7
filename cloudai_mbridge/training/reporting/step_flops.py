"""The model FLOPs of the step that was run, over all ranks: they follow its batch and its sequence lengths."""

from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

from cloudai_mbridge.training.flops import num_floating_point_operations


def flops_per_step(state: Any, seq_length: int | None = None) -> int:
    """Return the model FLOPs of one step at the current batch size, which a ramp-up changes.

    The lengths are, in this order: the sums that the forward step has counted on this rank, as `state.seqlen_sum` and
    `state.seqlen_squared_sum` (over the real sub-sequences of the step's micro-batches; 0 or missing: not counted);
    `seq_length`; the model's.
    """
    batch_size = get_current_running_global_batch_size()
    model = state.cfg.model
    if counted := getattr(state, "seqlen_sum", 0):
        chunks = model.virtual_pipeline_model_parallel_size or 1  # each has counted the same micro-batches
        replicas = mpu.get_data_parallel_world_size()
        tokens, squared = (int(local) * replicas // chunks for local in (counted, state.seqlen_squared_sum))
        return num_floating_point_operations(state.cfg, batch_size, tokens, squared)
    return flops_of_batch(model, batch_size, int(model.seq_length) if seq_length is None else seq_length)


def flops_of_batch(model: Any, batch_size: int, seq_length: int) -> int:
    """Return the model FLOPs to train on `batch_size` sequences of `seq_length` tokens."""
    tokens = batch_size * seq_length
    return num_floating_point_operations(SimpleNamespace(model=model), batch_size, tokens, tokens * seq_length)
