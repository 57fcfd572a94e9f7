"""The few numbers of a point that a sweep shows, for many points: what depends on few arguments is kept.

The same numbers as `estimate_point`, at about a hundred microseconds a point; memory, which takes longer, is worked
out once for all layouts between which it does not differ.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory import Assumptions, Layout, memory_per_stage
from cloudai_mbridge.estimate.point import GIB, assumptions_for, flops_of, speed_of, times_of, tokens_per_step
from cloudai_mbridge.estimate.question import Question, refusing
from cloudai_mbridge.estimate.time import TimeModel

START_UP_S = 300.0  # containers, imports, compilation: an allowance for budgets, not in gpu_hours
_MOST_KEPT = 10_000
_OF_MEMORY = attrgetter(*(field.name for field in fields(Layout) if field.name not in ("gbs", "num_gpus")))
# In an interleaved schedule the fullest moment comes within as many groups of pp micro-batches
_WHOLE_GROUPS, _GROUPS = 2, 4


@dataclass(frozen=True, slots=True)
class Headline:
    """Estimates of a point; None: not known, and `why` says the reasons. gpu_memory_gib: what the GPU has.

    modelled_gib: weights, gradients, optimizer and activations of the stage that needs most of them; the rest of the
    peak is what a safety share leaves room for: context, communicators, workspace, fragmentation.
    is_known_to_fit: its performance was published.
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

    @property
    def memory_share(self) -> float | None:
        """The share of the GPU's memory that states and activations need."""
        if self.modelled_gib is None or not self.gpu_memory_gib:
            return None
        return self.modelled_gib / self.gpu_memory_gib

    def exceeds(self, share: float | None) -> bool:
        """Return whether states and activations need more than this share, or all terms more than there is.

        A published point has run: it needs no room for what may be wrong with the estimate, and its share is 1.
        """
        if share is None or self.memory_share is None or not self.gpu_memory_gib:
            return False
        if self.is_known_to_fit:
            share = max(share, 1.0)
        return self.memory_share > share or (self.peak_memory_gib or 0.0) > max(share, 1.0) * self.gpu_memory_gib

    def gpu_hours(self, num_steps: int | None, start_up_s: float = 0.0) -> float | None:
        """Return the GPU-hours of a run, or None where step time or steps are not known."""
        if self.step_time_s is None or num_steps is None:
            return None
        return self.num_gpus * (self.step_time_s * num_steps + start_up_s) / 3600


class Headlines:
    """Estimates of many points. What is kept is bounded, however many points there are."""

    def __init__(self) -> None:
        self._memory: dict[Hashable, _Totals] = {}
        self._times: dict[Hashable, tuple[Architecture, TimeModel | str]] = {}
        self._flops: dict[Hashable, tuple[Architecture, int]] = {}

    def of(self, question: Question) -> Headline:
        """Return what is known of a point; what is wrong with it is a reason, no exception."""
        gpu, args = question.gpu, question.args
        name = gpu.name if gpu else None
        if gpu is None:
            return Headline(name, args.num_gpus, why=(question.why_no_gpu,))
        try:
            model = question.architecture
            layout = question.layout_of(model)
            flops = self._flops_of(question, model, layout)
        except BadInput as error:
            return Headline(name, args.num_gpus, why=(str(error),))
        memory, step = self._memory_of(question, model, layout), self._step_time_of(question, model, layout)
        seconds = step if isinstance(step, float) else None
        speed = speed_of(seconds, tokens_per_step(model, layout), flops, question)
        return Headline(
            gpu=name,
            num_gpus=args.num_gpus,
            peak_memory_gib=None if isinstance(memory, str) else memory[0] / GIB,
            gpu_memory_gib=gpu.memory_gib,
            worst_stage=None if isinstance(memory, str) else memory[1],
            modelled_gib=None if isinstance(memory, str) else memory[2] / GIB,
            step_time_s=seconds,
            tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu,
            tflops_per_gpu=speed.tflops_per_gpu,
            mfu=speed.mfu,
            why=tuple(why for why in (memory, step) if isinstance(why, str)),
            is_known_to_fit=question.is_known_to_fit,
        )

    def _flops_of(self, question: Question, model: Architecture, layout: Layout) -> int:
        key = (id(model), question.formula, layout.adapters_only)
        if key not in self._flops:
            flops = flops_of(model, question.formula, is_frozen=layout.adapters_only)
            _room(self._flops)[key] = (model, flops)  # the model lives as long as its id is a key
        return self._flops[key][1]

    def _step_time_of(self, question: Question, model: Architecture, layout: Layout) -> float | str:
        args = question.args
        key = (id(model), question.gpu and question.gpu.name, args.compute_dtype, args.task == "lora")
        if key not in self._times:
            try:
                with refusing("step_time_s cannot be estimated"):
                    _room(self._times)[key] = (model, times_of(question, model))
            except BadInput as error:
                _room(self._times)[key] = (model, str(error))
        times = self._times[key][1]
        if isinstance(times, str):
            return times
        try:
            with refusing("step_time_s cannot be estimated"):
                return times.step_time_s(layout)
        except BadInput as error:
            return str(error)

    def _memory_of(self, question: Question, model: Architecture, layout: Layout) -> tuple[float, int, float] | str:
        copies = (layout.dp > 1, layout.dp * layout.cp > 1, layout.expert_dp > 1)
        key = (id(model), assumptions_for(question.gpu), _OF_MEMORY(layout), _microbatches(layout), copies)
        kept = self._memory.get(key)
        if kept is None:
            kept = _room(self._memory)[key] = _Totals(model, assumptions_for(question.gpu))
        return kept.fullest(layout)


class _Totals:
    """Memory of the stages of layouts that differ in their data-parallel copies alone: a + b / dp, from two of them.

    Optimizer state, and with FSDP weights and gradients, are split over the copies; nothing else depends on them as
    long as there are, or are not, several of each kind.
    """

    def __init__(self, model: Architecture, assumptions: Assumptions) -> None:
        self.model = model  # lives as long as its id is a key
        self._assumptions = assumptions
        self._known: dict[int, tuple[float, ...]] = {}
        self._line: tuple[tuple[float, float], ...] | None = None

    def fullest(self, layout: Layout) -> tuple[float, int, float] | str:
        """Return bytes and number of the fullest stage, and the most states and activations, or why not."""
        totals = self._known.get(layout.dp)
        if totals is None and self._line is not None:
            totals = tuple([a + b / layout.dp for a, b in self._line])
        if totals is None:
            try:
                with refusing("memory cannot be estimated"):
                    stages = memory_per_stage(self.model, layout, self._assumptions)
            except BadInput as error:
                return str(error)
            modelled = [stage.states + stage.activations for stage in stages]
            totals = self._learn(layout.dp, (*[stage.total for stage in stages], *modelled))
        half = len(totals) // 2
        most = max(totals[:half])
        return most, totals.index(most), max(totals[half:])

    def _learn(self, dp: int, totals: tuple[float, ...]) -> tuple[float, ...]:
        for other, others in self._known.items():
            slopes = [(y - z) / (1 / dp - 1 / other) for y, z in zip(totals, others, strict=True)]
            self._line = tuple([(y - slope / dp, slope) for y, slope in zip(totals, slopes, strict=True)])
        self._known[dp] = totals
        return totals


def _microbatches(layout: Layout) -> int:
    """Return a number of micro-batches with the same memory: further ones repeat the schedule."""
    if layout.vp == 1 or layout.pp == 1:
        return min(layout.num_microbatches, layout.pp)
    groups, rest = divmod(layout.num_microbatches, layout.pp)
    return min(groups, _WHOLE_GROUPS if rest == 0 else _GROUPS) * layout.pp + rest


def _room(kept: dict[Hashable, Any]) -> dict[Hashable, Any]:
    """Return the store, emptied if it is full."""
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    return kept
