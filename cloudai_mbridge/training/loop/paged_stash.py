"""Experts with a fixed number of tokens per rank: a batch that does not fit is run again without the limit."""

from typing import Any

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from cloudai_mbridge.training.state import GlobalState


def with_second_try(schedule: Any, state: GlobalState, model: list[Any], optimizer: Any) -> Any:
    """Return Megatron's schedule of a batch, followed by its second try if tokens or stashed activations did not fit.

    The same schedule without `model.moe_expert_rank_capacity_factor`. The second try has no such limit, stashes
    nothing, and starts from empty gradients: nothing of the first one is left. schedule: wrapped for graphs of the
    full iteration, if any. optimizer: None in evaluation.
    """
    config = state.cfg.model
    if getattr(config, "moe_expert_rank_capacity_factor", None) is None:
        return schedule
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    copies = state.cfg.optimizer.reuse_grad_buf_for_mxfp8_param_ag and state.cfg.ddp.overlap_param_gather
    runner = PagedStashRunner(config, copies, model, optimizer, schedule)
    prepare = runner.prepare_for_rerun

    def without_graph(is_training: bool = True) -> None:
        """Delete the graph first, which reads the stash: the runner does that for a bare wrapper alone."""
        stage = "training" if is_training else "validation"
        if FullCudaGraphWrapper.cuda_graph[stage] is not None:
            FullCudaGraphWrapper.reset_cuda_graph(None, stage)  # all of its state is the class's
        prepare(is_training)

    runner.prepare_for_rerun = without_graph
    return runner
