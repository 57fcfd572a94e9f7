"""Experts with a fixed number of tokens per rank: a batch that does not fit is run again without the limit."""

from typing import Any

from cloudai_mbridge.training.state import GlobalState


def with_second_try(schedule: Any, state: GlobalState, model: list[Any], optimizer: Any) -> Any:
    """Return Megatron's schedule of a batch, followed by its second try if tokens or stashed activations did not fit.

    The same schedule without `model.moe_expert_rank_capacity_factor`. The second try has no such limit, stashes
    nothing, and starts from empty gradients: nothing of the first one is left. schedule: wrapped for graphs of the
    full iteration where there are any. optimizer: None in evaluation.
    """
    config = state.cfg.model
    if getattr(config, "moe_expert_rank_capacity_factor", None) is None:
        return schedule
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    copies_parameters = state.cfg.optimizer.reuse_grad_buf_for_mxfp8_param_ag and state.cfg.ddp.overlap_param_gather
    return PagedStashRunner(config, copies_parameters, model, optimizer, schedule)
