"""The forward step of GPT training: padded and packed sequences, on any stage of any layout."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model

from cloudai_mbridge.training.compat.batches import batch_on_this_cp_rank
from cloudai_mbridge.training.data.packed_batch import (
    get_packed_seq_params,
    longest_sequence,
    packed_on_this_cp_rank,
    sequence_bounds,
)
from cloudai_mbridge.training.losses import create_masked_next_token_loss_function
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.state import GlobalState

_TOKENS, _LABELS = ("tokens", "position_ids"), ("labels", "loss_mask")


class Batch(NamedTuple):
    """One micro-batch on this rank: this context-parallel rank's share, on its device. None: not needed on this stage.

    tokens, labels, loss_mask and position_ids are [b, s / cp]; cu_seqlens holds the bounds of the packed sequences,
    without padding to cut off, so the fields with cut-off positions are None. Order and names are Megatron-Bridge's.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_argmin: torch.Tensor | None = None
    max_seqlen: int | None = None
    cu_seqlens_unpadded: torch.Tensor | None = None
    cu_seqlens_unpadded_argmin: torch.Tensor | None = None


def forward_step(
    state: GlobalState, data_iterator: Iterator[dict[str, Any]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch forward; the returned function turns the last stage's output into the loss.

    data_iterator: may be None on a stage that needs no data.
    return_schedule_plan: return Megatron's plan of this forward pass in place of its output.

    AssertionError: a schedule plan is requested without `overlap_moe_expert_parallel_comm`.
    """
    if return_schedule_plan:
        assert state.cfg.model.overlap_moe_expert_parallel_comm, (
            "a schedule plan is only for model.overlap_moe_expert_parallel_comm = True"
        )
    chunk = unwrap_model(model)
    timer = state.timers("batch-generator", log_level=2)
    timer.start()
    with state.straggler_timer(bdata=True):
        batch = get_batch(data_iterator, state.cfg, **_stage(chunk))
    timer.stop()
    rerun = state.cfg.rerun_state_machine
    mask: Any = batch.loss_mask  # None off the last stage, which does not call the function
    loss_function = create_masked_next_token_loss_function(
        mask, rerun.check_for_nan_in_loss, rerun.check_for_spiky_loss
    )
    arguments: dict[str, Any] = {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "labels": batch.labels,
    }
    if getattr(state.cfg.model, "mtp_num_layers", None):
        arguments["loss_mask"] = batch.loss_mask
    if (bounds := batch.cu_seqlens) is not None:
        packed = {"cu_seqlens": bounds, "cu_seqlens_argmin": len(bounds), "max_seqlen": batch.max_seqlen}
        if getattr(state.cfg.model, "is_hybrid_model", False):  # whose Mamba layers need the sequence of each token
            own = next((each for each in (batch.tokens, batch.labels) if each is not None), None)
            cp = mpu.get_context_parallel_world_size()
            packed["total_tokens"] = state.cfg.model.seq_length if own is None else own.size(1) * cp
        arguments["packed_seq_params"] = get_packed_seq_params(packed)
    with state.straggler_timer:
        if return_schedule_plan:
            return chunk.build_schedule_plan(**arguments), loss_function
        return model(**arguments), loss_function


def get_batch(
    data_iterator: Iterator[dict[str, Any]] | None,
    cfg: Any,
    use_mtp: bool = False,
    *,
    is_first: bool | None = None,
    is_last: bool | None = None,
    pg_collection: Any = None,
) -> Batch:
    """Take the next micro-batch and keep the parts that this stage needs.

    data_iterator: yields CPU tensors of whole sequences: tokens, labels, loss_mask, position_ids [b, s], and
        attention_mask if the data set yields it; packed sequences (b = 1) come with cu_seqlens, and optionally with
        cu_seqlens_argmin and max_seqlen.
    use_mtp: multi-token prediction on the last stage embeds the tokens again.
    is_first, is_last: this stage's place; by default that of the pipeline rank, in Megatron's own groups.
    pg_collection: not used.

    ValueError: packed sequences in more than one row, or that context parallelism cannot split.
    """
    if is_first is None:
        is_first = mpu.is_pipeline_first_stage(ignore_virtual=True)
    if is_last is None:
        is_last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    if data_iterator is None:
        return Batch()
    rows = next(data_iterator)
    wanted = (_TOKENS if is_first or (is_last and use_mtp) else ()) + (_LABELS if is_last else ())
    bounds = sequence_bounds(rows)
    if bounds is not None:
        share = packed_on_this_cp_rank({key: rows[key] for key in wanted}, bounds)
        return Batch(**_to_device({**share, "cu_seqlens": bounds}), max_seqlen=longest_sequence(rows, bounds))
    if not getattr(cfg.dataset, "skip_getting_attention_mask_from_dataset", True) and "attention_mask" in rows:
        wanted += ("attention_mask",)  # which every stage needs
    return Batch(**_to_device(batch_on_this_cp_rank({key: rows[key] for key in wanted})))


def _stage(chunk: Any) -> dict[str, bool]:
    """Return the roles of a model chunk, by default from its place in the pipeline."""
    stage = getattr(chunk, "vp_stage", None)
    place = {"ignore_virtual": stage is None, "vp_stage": stage}
    has_mtp = bool(getattr(chunk, "mtp_process", False))
    return {
        "use_mtp": has_mtp,
        "is_first": getattr(chunk, "pre_process", mpu.is_pipeline_first_stage(**place)),
        "is_last": getattr(chunk, "post_process", mpu.is_pipeline_last_stage(**place)) or has_mtp,
    }


def _to_device(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    device = current_device()
    return {key: value.to(device, non_blocking=True) for key, value in tensors.items()}
