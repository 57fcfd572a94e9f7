"""One training step of a built rank: the loop's own `train_step`, on tensors that have shapes and no values.

A step of all micro-batches would be dear: two steps of few are run, and as every further micro-batch does the same,
their difference gives the rest exactly. The second one's activations are those of the steady state.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.pipeline_parallel import schedules

from cloudai_mbridge.training.checkpointing.optimizer_state import parts_of
from cloudai_mbridge.training.compat.batches import count_micro_batches
from cloudai_mbridge.training.dry import balanced
from cloudai_mbridge.training.dry.allocator import CachingAllocator
from cloudai_mbridge.training.dry.attention import stand_in
from cloudai_mbridge.training.dry.balanced import Balanced
from cloudai_mbridge.training.dry.communication import Recorder
from cloudai_mbridge.training.dry.counting import Flops, Kept, Live, StepObserver
from cloudai_mbridge.training.dry.log import Log
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.optim import build_scheduler
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.resilience.rerun_machine import initialize_rerun
from cloudai_mbridge.training.setup import connect
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.step import prepare_forward_step_func, train_step, with_own_reports


class StepTaken:
    """What one step did."""

    def __init__(self, log: Log, flops: Flops, kept: Kept, live: Live, observer: StepObserver) -> None:
        self.log, self.flops, self.kept, self.live, self.timeline = log, flops, kept, live, observer.timeline


class Stepper:
    """Takes steps of a built rank, on any number of micro-batches."""

    def __init__(self, config: Any, chunks: list[Any], optimizer: Any) -> None:
        self.config, self.chunks, self.optimizer = config, chunks, optimizer
        self.state, self.allocator = GlobalState(config), CachingAllocator()
        initialize_rerun(config)
        connect(self.state, chunks, optimizer)
        experts = getattr(config.model, "num_moe_experts", None) or 0
        Balanced.experts, Balanced.topk = experts, getattr(config.model, "moe_router_topk", 0)
        model = config.model
        length = model.seq_length // model.context_parallel_size
        length //= model.tensor_model_parallel_size if model.sequence_parallel else 1
        if not getattr(chunks[0].config, "mtp_standalone", False):  # whose stages send messages of several shapes
            Balanced.message = (length, config.train.micro_batch_size, model.hidden_size)
        self.scheduler = build_scheduler(config, optimizer)
        self.function = with_own_reports(prepare_forward_step_func(forward_step, self.state))
        for chunk in chunks:
            chunk.train()

    def take(self, count: int) -> StepTaken:
        """Take a step of `count` micro-batches."""
        _set_count(self.config, count)
        recorder, flops, kept = Recorder(is_real=False), Flops(), Kept(self.chunks)
        live = Live(flops, self.allocator)
        recorder.answer = balanced.answer
        observer = StepObserver(recorder, flops, kept)
        rows = [_rows(self.config, count) for _ in self.chunks]
        iterator: Any = rows if len(rows) > 1 else rows[0]
        with ExitStack() as stack:
            stack.enter_context(recorder.recording())
            stack.enter_context(observer.observing(self.chunks))
            stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", None))
            torch.nn.functional.scaled_dot_product_attention = stand_in(flops.note)
            if (kernels := sys.modules.get("cloudai_mbridge.training.dry.kernels")) is not None:
                kernels.note_flops(flops.note)
            _follow_backward(stack)
            self._without_arithmetic(stack)
            stack.enter_context(kept.counting(live.resized))
            stack.enter_context(flops)
            stack.enter_context(live)
            train_step(self.function, iterator, self.chunks, self.optimizer, self.scheduler, self.state)
        return StepTaken(recorder.log, flops, kept, live, observer)

    def _without_arithmetic(self, stack: ExitStack) -> None:
        """Leave out what the optimizer computes on its own values, for which it calls kernels."""

        def apply(function: Any, *args: Any) -> Any:
            norm = torch.zeros(1, dtype=torch.float32, device=current_device())
            return norm, norm

        for module in (clip_grads, megatron_optimizer):
            if hasattr(module, "multi_tensor_applier"):
                stack.enter_context(mock.patch.object(module, "multi_tensor_applier", apply))
        for part in parts_of(self.optimizer):
            if (inner := getattr(part, "optimizer", None)) is not None:
                stack.enter_context(mock.patch.object(inner, "step", return_value=None))


def _set_count(config: Any, count: int) -> None:
    replicas = mpu.get_data_parallel_world_size()
    own = {"global_batch_size": count * config.train.micro_batch_size * replicas, "rampup_batch_size": None}
    train = SimpleNamespace(**{**vars(config.train), **own})
    calculators.destroy_num_microbatches_calculator()
    count_micro_batches(-1, train, replicas)


def _rows(config: Any, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of whole sequences, or all `count` of them at once where the loop splits a global batch."""
    together = count if config.dataset.dataloader_type == "batch" else 1
    shape = (config.train.micro_batch_size * together, config.model.seq_length)
    whole = torch.zeros(shape, dtype=torch.int64, device=current_device())
    mask = torch.ones(shape, dtype=torch.float32, device=current_device())
    while True:
        yield {"tokens": whole, "labels": whole, "loss_mask": mask, "position_ids": whole}


def _follow_backward(stack: ExitStack) -> None:
    """Let the backward pass of deallocated outputs see the machine, too: it calls torch's engine directly."""
    autograd: Any = torch.autograd

    def run_backward(tensors: Any, grad_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad")
        options = dict(zip(names, args, strict=False)) | kwargs
        given = [options.pop(name, False) for name in ("keep_graph", "create_graph", "inputs")]
        return autograd._engine_run_backward(tensors, grad_tensors, *given, **options)

    engine = SimpleNamespace(_execution_engine=SimpleNamespace(run_backward=run_backward))
    stack.enter_context(mock.patch.object(schedules, "Variable", engine))


def step(config: Any, chunks: list[Any], optimizer: Any, *, in_full: bool = False) -> tuple[dict[str, Any], Log]:
    """Take the steps of a rank; return what a step of all its micro-batches does, and the log of the last one.

    in_full: take one step of all micro-batches.
    """
    started, every = time.process_time(), get_num_microbatches()
    stepper = Stepper(config, chunks, optimizer)
    pp = mpu.get_pipeline_model_parallel_world_size()
    few = every if in_full else min(every, pp)
    more = min(every, 2 * few)
    # Not counted: the first step gathers a chunk that, in those that follow, the step before has gathered; and
    # Megatron-Core 0.19 agrees once on the layers whose losses of experts it logs
    stepper.take(min(every, pp))
    runs = [(count, stepper.take(count)) for count in sorted({few, more})]
    try:
        flops, calls = _totals(runs, every)
    except ValueError:  # micro-batches in rounds of another length
        runs = [(every, stepper.take(every))]
        flops, calls = _totals(runs, every)
    last = runs[-1][1]
    # Transformer Engine keeps the rest out of sight where it offloads layers
    is_seen = not getattr(config.model, "cpu_offloading", False)
    kept = {"peak_bytes": last.kept.peak, "at_peak": last.kept.at_peak()} if is_seen else None
    found = {
        "micro_batches": every,
        "micro_batches_run": [count for count, _ in runs],
        "flops": flops,
        "activations": kept,
        "peaks": dict(last.live.peaks),
        "reserved_bytes": _reserved(stepper.allocator, last.live),
        "communication": calls,
        "timeline": last.timeline,
        "layers": "transformer_engine" if has_transformer_engine() else "local",
        "dispatcher": getattr(config.model, "moe_token_dispatcher_type", None),
        "step_cpu_s": round(time.process_time() - started, 2),
    }
    return found, last.log


def _reserved(allocator: CachingAllocator, live: Live) -> int:
    """Return what torch reserves for tensors that come and go: with expandable segments what is in use at most."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return max(live.peaks.values()) if "expandable_segments:True" in ",".join(settings) else allocator.reserved


def _totals(runs: list[tuple[int, StepTaken]], every: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    flops = _extrapolated([(count, dict(run.flops.by_phase)) for count, run in runs], every)
    return flops, communication([(count, run.log) for count, run in runs], every)


def communication(logs: list[tuple[int, Log]], every: int) -> list[dict[str, Any]]:
    """Return calls and bytes by group and kind of a step of `every` micro-batches, from steps of fewer."""
    tables = [(count, log.totals()) for count, log in logs]
    sizes = {(each["group"], each["kind"]): each["size"] for _, table in tables for each in table}
    calls, sent = (
        _extrapolated([(n, {(e["group"], e["kind"]): e[name] for e in table}) for n, table in tables], every)
        for name in ("calls", "bytes")
    )
    return [
        {"group": key[0], "size": sizes[key], "kind": key[1], "calls": calls[key], "bytes": sent[key]}
        for key in sorted(sizes)
    ]


def _extrapolated(counted: list[tuple[int, dict[Any, int]]], every: int) -> dict[Any, int]:
    """Return counts at `every` micro-batches on the line through those of the last two steps."""
    count, last = counted[-1]
    if count == every or len(counted) == 1:
        return last
    before, first = counted[-2]
    # keys that one of them lacks are 0 there
    keys = first.keys() | last.keys()
    grown = {key: last.get(key, 0) - first.get(key, 0) for key in keys}
    if wrong := [key for key in keys if grown[key] < 0 or grown[key] * (every - count) % (count - before)]:
        raise ValueError(f"the counts of {wrong[0]} don't grow by whole numbers with micro-batches: {grown[wrong[0]]}")
    return {key: last.get(key, 0) + grown[key] * (every - count) // (count - before) for key in keys}
