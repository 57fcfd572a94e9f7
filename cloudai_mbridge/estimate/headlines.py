"""Headlines of many points; results that depend on few arguments are cached.

The numbers equal the results of `estimate_point`. A *shape* is a point without its GPUs and its batch; the points of a
sweep share few shapes, and each further point of a shape costs little.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Gpu
from cloudai_mbridge.estimate.headline import Headline
from cloudai_mbridge.estimate.memory import ParallelLayout
from cloudai_mbridge.estimate.memory.other import GIB
from cloudai_mbridge.estimate.memory.totals import WHAT_STAYS, Kept, MemoryTotals
from cloudai_mbridge.estimate.point import assumptions_for, flops_of, speed_of, times_of, tokens_per_step
from cloudai_mbridge.estimate.request import EstimateRequest, answer_or_why, refusing
from cloudai_mbridge.estimate.time import TimeModel

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Shape:
    """Values shared by points that differ in GPUs and batch alone.

    layout: of one of them. times: or the reason for none.
    proven_gib: the most states and activations that are predicted for a published point of this shape.
    shipped_gib: the same of the preset of the pinned release.
    """

    request: EstimateRequest
    gpu: Gpu
    model: Architecture
    layout: ParallelLayout
    flops: int
    times: TimeModel | str
    memory: MemoryTotals
    proven_gib: float | None
    shipped_gib: float | None = None

    def step_time_s(self, layout: ParallelLayout) -> float:
        """Return the seconds of a step; BadInput if step times are unavailable."""
        if isinstance(self.times, str):
            raise BadInput(self.times)
        return self.times.step_time_s(layout)


class Headlines:
    """Estimates of many points. The cache is bounded, however many points there are."""

    def __init__(self) -> None:
        self._memory = Kept[MemoryTotals]()
        self._times = Kept[tuple[Architecture, TimeModel | str]]()
        self._flops = Kept[tuple[Architecture, int]]()

    def of(self, request: EstimateRequest) -> Headline:
        """Return the headline of a point; an invalid point yields a reason, not an exception."""
        shape = self.shape_of(request)
        return shape if isinstance(shape, Headline) else self.at(shape, shape.layout)

    def shape_of(self, request: EstimateRequest) -> Shape | Headline:
        """Return the shape of a point, or its headline if it cannot be estimated."""
        gpu, args = request.gpu, request.args
        if gpu is None:
            return Headline(None, args.num_gpus, why=(request.why_no_gpu,))
        try:
            model = request.architecture
            layout = request.layout_of(model)
            flops = self._flops_of(request, model, layout)
        except BadInput as error:
            return Headline(gpu.name, args.num_gpus, why=(str(error),))
        times, memory = self._times_of(request, model, gpu), self._memory_of(model, layout, gpu)
        rows = [(row.args.num_gpus, row.args.mb or 1, row.args.gb) for row in request.published_shape(model)]
        proven = _proven_gib(memory, model, layout, rows, (gpu.memory_gib or 0.0) * GIB)
        shipped = _proven_gib(memory, model, layout, request.shipped, math.inf)
        return Shape(request, gpu, model, layout, flops, times, memory, proven, shipped)

    def at(self, shape: Shape, layout: ParallelLayout) -> Headline:
        """Return the headline of a point of this shape, whose layout differs in GPUs and batch alone."""
        why: list[str] = []
        memory = answer_or_why("memory", lambda: shape.memory.fullest(shape.model, layout), why.append)
        peak, worst, modelled = (memory[0] / GIB, memory[1], memory[2] / GIB) if memory else (None, None, None)
        step = answer_or_why("step_time_s", lambda: shape.step_time_s(layout), why.append)
        speed = speed_of(step, tokens_per_step(shape.model, layout), shape.flops, shape.request, layout.num_gpus)
        return Headline(
            gpu=shape.gpu.name,
            num_gpus=layout.num_gpus,
            peak_memory_gib=peak,
            gpu_memory_gib=shape.gpu.memory_gib,
            worst_stage=worst,
            modelled_gib=modelled,
            **vars(speed),
            why=tuple(why),
            is_known_to_fit=_needs_no_more(modelled, shape.proven_gib),
            is_shipped=_needs_no_more(modelled, shape.shipped_gib),
        )

    def _flops_of(self, request: EstimateRequest, model: Architecture, layout: ParallelLayout) -> int:
        adapters = layout.adapters
        key = (id(model), request.formula, adapters)  # the model is kept too: it lives as long as its id is a key
        return self._flops.once(key, lambda: (model, flops_of(model, request.formula, adapters)))[1]

    def _times_of(self, request: EstimateRequest, model: Architecture, gpu: Gpu) -> TimeModel | str:
        def work_out() -> tuple[Architecture, TimeModel | str]:
            why: list[str] = []
            return model, answer_or_why("step_time_s", lambda: times_of(request, model), why.append) or why[0]

        key = (id(model), gpu, request.args.compute_dtype, request.trains_adapters)
        return self._times.once(key, work_out)[1]

    def _memory_of(self, model: Architecture, layout: ParallelLayout, gpu: Gpu) -> MemoryTotals:
        assumptions = assumptions_for(gpu)
        key = (replace(model, seq_length=1), WHAT_STAYS(layout), assumptions)
        return self._memory.once(key, lambda: MemoryTotals(assumptions))


def _needs_no_more(modelled: float | None, proven: float | None) -> bool:
    return modelled is not None and proven is not None and modelled <= proven


def _proven_gib(
    memory: MemoryTotals,
    model: Architecture,
    layout: ParallelLayout,
    have_run: Iterable[tuple[int, int, int | None]],
    most: float,
) -> float | None:
    """Return the GiB that GPUs and batches that have run prove to fit, except those predicted to exceed `most`."""
    proven: list[float] = []
    for sizes in have_run:
        with suppress(BadInput), refusing("the layout cannot be estimated"):
            peak, _, modelled = memory.fullest(model, layout.resized(*sizes))
            if peak <= most:
                proven.append(modelled / GIB * (1 + _ROUNDING))
    return max(proven, default=None)
