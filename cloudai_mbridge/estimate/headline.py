"""The summary of a point that a sweep shows, its memory limit, and its price.

Results that depend on few arguments are cached. The numbers equal the results of `estimate_point`.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions, StageTotals, kind_of
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.without_model import WithoutModel
from cloudai_mbridge.estimate.point import assumptions_for, flops_of, speed_of, times_of, tokens_per_step
from cloudai_mbridge.estimate.request import EstimateRequest, answer_or_why, refusing

START_UP_S = 300.0  # containers, imports, compilation: an allowance for budgets, not in gpu_hours


@dataclass(frozen=True)
class MemoryLimit:
    """Which share of a GPU's memory states and activations may need.

    is_asked_for: set by the user; then points of unknown memory exceed it. The default lets these pass, and points
    whose performance was published: these have run, and need no room for the estimate's error.
    """

    share: float
    is_asked_for: bool = True


DEFAULT_LIMIT = MemoryLimit(0.9, is_asked_for=False)


@dataclass(frozen=True, slots=True)
class Headline:
    """Estimates of a point; None if unknown, with the reasons in `why`. gpu_memory_gib: of the GPU.

    modelled_gib: weights, gradients, optimizer and activations of the stage that needs most of them; the rest of the
    peak is what a safety share leaves room for: context, communicators, workspace, fragmentation.
    is_known_to_fit: a published point that differs in GPUs and batch alone needs as much.
    is_shipped: a preset of the pinned release for this GPU needs as much: it fits, whatever is predicted.
    why_less: settings that save memory without a model, "" if there are none or the point fits anyway: the peak is then
    an upper bound, and the memory is as good as unknown.
    """

    gpu: str | None
    num_gpus: int
    peak_memory_gib: float | None = None
    modelled_gib: float | None = None
    gpu_memory_gib: float | None = None
    worst_stage: int | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    why: tuple[str, ...] = ()
    is_known_to_fit: bool = False
    is_shipped: bool = False
    why_less: str = ""

    @property
    def memory_share(self) -> float | None:
        """The share of the GPU's memory that states and activations need."""
        if self.modelled_gib is None or not self.gpu_memory_gib:
            return None
        return self.modelled_gib / self.gpu_memory_gib

    def exceeds(self, limit: MemoryLimit | None) -> bool:
        """Return whether states and activations exceed the share, or all terms exceed the GPU's memory."""
        if limit is None or (self.is_shipped and not limit.is_asked_for):
            return False
        if self.memory_share is None or not self.gpu_memory_gib:
            return limit.is_asked_for
        if self.why_less and not limit.is_asked_for:
            return False
        share = limit.share if limit.is_asked_for or not self.is_known_to_fit else max(limit.share, 1.0)
        return self.memory_share > share or (self.peak_memory_gib or 0.0) > max(share, 1.0) * self.gpu_memory_gib

    def gpu_hours(self, num_steps: int | None, start_up_s: float = 0.0) -> float | None:
        """Return the GPU-hours of a run, or None if step time or steps are unknown."""
        if self.step_time_s is None or num_steps is None:
            return None
        return self.num_gpus * (self.step_time_s * num_steps + start_up_s) / 3600


_ROUNDING = 1e-9


def headline_estimator() -> Callable[[EstimateRequest], Headline]:
    """Return a function that estimates points; those that differ in copies and tokens alone share memory totals."""
    return partial(_headline, lru_cache(maxsize=10_000)(lambda kind, assumptions: StageTotals(assumptions)))


def _headline(totals_of: Callable[[Hashable, Assumptions], StageTotals], request: EstimateRequest) -> Headline:
    """Return the headline of a point; an invalid point yields a reason, not an exception."""
    gpu = request.gpu
    if gpu is None:
        return Headline(None, request.args.num_gpus, why=(request.why_no_gpu,))
    try:
        model = request.architecture
        layout = request.layout_of(model)
        flops = flops_of(model, request.formula, layout.adapters)
    except BadInput as error:
        return Headline(gpu.name, request.args.num_gpus, why=(str(error),))
    assumptions, why = assumptions_for(gpu, expands_segments=request.expands_segments), list[str]()

    def fullest(layout: ParallelLayout) -> tuple[float, int, float]:
        return totals_of(kind_of(model, layout), assumptions).fullest(model, layout)

    needed = answer_or_why("memory", lambda: fullest(layout), why.append)
    peak, worst, modelled = (needed[0] / GIB, needed[1], needed[2] / GIB) if needed else (None, None, None)
    step = answer_or_why("step_time_s", lambda: times_of(request, model).step_time_s(layout), why.append)

    def is_proven(have_run: Iterable[tuple[int, int, int | None]], most: float) -> bool:
        """Return whether GPUs and batches have run that need as much, except those predicted to exceed `most`."""
        if modelled is None:
            return False
        for num_gpus, mbs, gbs in have_run:
            with suppress(BadInput), refusing("the layout cannot be estimated"):
                ran = fullest(layout.changed(num_gpus=num_gpus, mbs=mbs, gbs=gbs))
                if ran[0] <= most and modelled <= ran[2] / GIB * (1 + _ROUNDING):
                    return True
        return False

    def published() -> list[tuple[int, int, int | None]]:
        return [(row.args.num_gpus, row.args.mb or 1, row.args.gb) for row in request.published_shape(model)]

    limit = DEFAULT_LIMIT.share * (gpu.memory_gib or 0.0)  # a proof changes nothing below the default limit
    is_over = modelled is not None and (modelled > limit or (peak or 0.0) > (gpu.memory_gib or 0.0))
    unmodelled = request.without_model(layout) if is_over else WithoutModel()
    return Headline(
        gpu=gpu.name,
        num_gpus=layout.num_gpus,
        peak_memory_gib=peak,
        gpu_memory_gib=gpu.memory_gib,
        worst_stage=worst,
        modelled_gib=modelled,
        **speed_of(step, tokens_per_step(model, layout), flops, request, layout.num_gpus),
        why=tuple(why),
        is_known_to_fit=is_over and is_proven(published(), (gpu.memory_gib or 0.0) * GIB),
        is_shipped=is_over and is_proven(request.shipped, math.inf),
        why_less=str(unmodelled) if unmodelled.may_need_less else "",
    )
