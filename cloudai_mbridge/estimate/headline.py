"""The few numbers of a point that a sweep shows, for many points: what depends on few arguments is kept.

The same numbers as `estimate_point`, at about a hundred microseconds a point; memory, which takes longer, is worked
out once for all layouts between which it does not differ.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory import (
    Assumptions,
    Granularity,
    Implementation,
    Layout,
    StageMemory,
    memory_per_stage,
)
from cloudai_mbridge.estimate.point import GIB, assumptions_for, flops_of, speed_of, times_of, tokens_per_step
from cloudai_mbridge.estimate.question import Question, refusing
from cloudai_mbridge.estimate.time import TimeModel

START_UP_S = 300.0  # containers, imports, compilation: an allowance for budgets, not in gpu_hours
_MOST_KEPT = 10_000
_NOT_OF_MEMORY = ("gbs", "num_gpus", "mbs", "seq_length")
_OF_MEMORY = attrgetter(*(field.name for field in fields(Layout) if field.name not in _NOT_OF_MEMORY))
_CONSTANT = ("nccl", "cuda context", "workspace")
# In an interleaved schedule the fullest moment comes within as many groups of pp micro-batches
_WHOLE_GROUPS, _GROUPS = 2, 4


@dataclass(frozen=True)
class MemoryLimit:
    """Which share of a GPU's memory states and activations may need.

    trusts_published: a point whose performance was published has run, and needs no room for the estimate's error.
    """

    share: float
    trusts_published: bool = False


DEFAULT_LIMIT = MemoryLimit(0.9, trusts_published=True)


@dataclass(frozen=True, slots=True)
class Headline:
    """Estimates of a point; None: not known, and `why` says the reasons. gpu_memory_gib: what the GPU has.

    modelled_gib: weights, gradients, optimizer and activations of the stage that needs most of them; the rest of the
    peak is what a safety share leaves room for: context, communicators, workspace, fragmentation.
    is_known_to_fit: its performance was published, or that of the same with a larger batch.
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

    def exceeds(self, limit: MemoryLimit | None) -> bool:
        """Return whether states and activations need more than the share, or all terms more than there is."""
        if limit is None or self.memory_share is None or not self.gpu_memory_gib:
            return False
        share = max(limit.share, 1.0) if limit.trusts_published and self.is_known_to_fit else limit.share
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
        self._families: dict[Hashable, tuple[Architecture, int]] = {}
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
            is_known_to_fit=question.is_known_to_fit(model),
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
        assumptions = assumptions_for(question.gpu)
        shape = (self._family_of(model), _OF_MEMORY(layout), _microbatches(layout), _lengths(model, layout))
        key = (*shape, assumptions, copies)
        kept = self._memory.get(key)
        if kept is None:
            kept = _room(self._memory)[key] = _Totals(assumptions)
        return kept.fullest(model, layout)

    def _family_of(self, model: Architecture) -> int:
        """Return a number that models share which differ in their sequence length alone."""
        known = self._families.get(id(model))
        if known is None:
            family = hash(replace(model, seq_length=1))
            known = _room(self._families)[id(model)] = (model, family)
        return known[1]


class _Totals:
    """Memory of the stages of layouts that differ in data-parallel copies and tokens: a + b / dp + c tokens.

    Optimizer state, and with FSDP weights and gradients, are split over the copies: two of them tell all. Activations,
    and what else comes and goes, grow with the tokens of a micro-batch: one tells all, where `_lengths` says so.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._line: tuple[tuple[float, float], ...] | None = None
        self._per_token: tuple[float, ...] = ()

    def fullest(self, model: Architecture, layout: Layout) -> tuple[float, int, float] | str:
        """Return bytes and number of the fullest stage, and the most states and activations, or why not."""
        fixed = self._fixed.get(layout.dp)
        if fixed is None and self._line is not None:
            fixed = tuple([a + b / layout.dp for a, b in self._line])
        if fixed is None:
            try:
                with refusing("memory cannot be estimated"):
                    fixed = self._learn(layout.dp, _tokens(model, layout), self._stages(model, layout))
            except BadInput as error:
                return str(error)
        tokens = _tokens(model, layout)
        totals = [a + c * tokens for a, c in zip(fixed, self._per_token, strict=True)]
        half = len(totals) // 2
        most = max(totals[:half])
        return most, totals.index(most), max(totals[half:])

    def _stages(self, model: Architecture, layout: Layout) -> tuple[StageMemory, ...]:
        return memory_per_stage(model, layout, self._assumptions)

    def _learn(self, dp: int, tokens: float, stages: Sequence[StageMemory]) -> tuple[float, ...]:
        """Keep what the stages tell: all terms of each, then its states and activations of each."""
        states = [stage.states for stage in stages]
        fixed = (*(stage.states + sum(stage.terms[name] for name in _CONSTANT) for stage in stages), *states)
        moving = (*(stage.total for stage in stages), *(stage.states + stage.activations for stage in stages))
        self._per_token = tuple([(total - a) / tokens for total, a in zip(moving, fixed, strict=True)])
        for other, others in self._fixed.items():
            slopes = [(y - z) / (1 / dp - 1 / other) for y, z in zip(fixed, others, strict=True)]
            self._line = tuple([(y - slope / dp, slope) for y, slope in zip(fixed, slopes, strict=True)])
        self._fixed[dp] = fixed
        return fixed


def _tokens(model: Architecture, layout: Layout) -> float:
    """Return the tokens of a micro-batch on a rank."""
    return layout.mbs * (layout.seq_length or model.seq_length) / layout.cp


def _lengths(model: Architecture, layout: Layout) -> Hashable:
    """Return what of the lengths memory depends on beside the tokens: nothing, for whole shares of a fused kernel."""
    tokens = layout.mbs * (layout.seq_length or model.seq_length)
    is_linear = layout.implementation is Implementation.FUSED and model.position_embedding_type != "learned_absolute"
    if not is_linear or tokens % (layout.cp * layout.tp):
        return layout.mbs, layout.seq_length or model.seq_length
    # a fully recomputed chunk keeps rotation angles of the sequence, whatever the number of sequences
    return layout.mbs if layout.recompute.granularity is Granularity.FULL else None


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
