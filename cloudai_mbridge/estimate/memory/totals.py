"""Memory of many layouts: computed once for all layouts that differ by a formula.

Memory split over data-parallel copies scales with 1 / dp, transient memory with the tokens of a micro-batch. The
results equal `memory_per_stage`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TypeVar

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.estimate import StageMemory, memory_per_stage
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout
from cloudai_mbridge.estimate.memory.other import Assumptions

_VARYING = ("gbs", "num_gpus", "mbs", "seq_length")
WHAT_STAYS = attrgetter(*(field.name for field in fields(ParallelLayout) if field.name not in _VARYING))
_MOST_KEPT = 10_000
T = TypeVar("T")
_CONSTANT = ("nccl", "cuda context", "workspace")
# In an interleaved schedule the fullest moment comes within as many groups of pp micro-batches
_WHOLE_GROUPS, _GROUPS = 2, 4


class Kept(dict[Hashable, T]):
    """A dictionary that is emptied when it is full: its size is bounded for any number of points."""

    def __setitem__(self, key: Hashable, value: T) -> None:
        if len(self) >= _MOST_KEPT:
            self.clear()
        super().__setitem__(key, value)

    def once(self, key: Hashable, work_out: Callable[[], T]) -> T:
        """Return the cached value of a key; compute it if missing."""
        if key not in self:
            self[key] = work_out()
        return self[key]


class MemoryTotals:
    """The fullest stage of layouts of one model that differ in GPUs, batch and lengths alone."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._known = Kept[_Stages]()

    def fullest(self, model: Architecture, layout: ParallelLayout) -> tuple[float, int, float]:
        """Return bytes and number of the fullest stage, and the most bytes of states and activations of a stage.

        model: the same in every call, except its sequence length. Raises as `memory_per_stage` does.
        """
        dp, cp = layout.dp, layout.cp
        copies = (dp > 1, dp * cp > 1, layout.expert_dp > 1)
        key = (_microbatches(layout), _lengths(model, layout), copies)
        return self._known.once(key, lambda: _Stages(self._assumptions)).fullest(model, layout)


class _Stages:
    """Memory of the stages of layouts that differ in data-parallel copies and tokens: a + b / dp + c tokens.

    Two numbers of copies determine a and b; one number of tokens determines c, if `_lengths` leaves them out.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._line: tuple[tuple[float, float], ...] | None = None
        self._per_token: tuple[float, ...] = ()

    def fullest(self, model: Architecture, layout: ParallelLayout) -> tuple[float, int, float]:
        """Return bytes and number of the fullest stage, and the most states and activations."""
        fixed = self._fixed.get(layout.dp)
        if fixed is None and self._line is not None:
            fixed = tuple([a + b / layout.dp for a, b in self._line])
        tokens = layout.mbs * (layout.seq_length or model.seq_length) / layout.cp  # of a micro-batch on a rank
        if fixed is None:
            fixed = self._learn(layout.dp, tokens, memory_per_stage(model, layout, self._assumptions))
        totals = [a + c * tokens for a, c in zip(fixed, self._per_token, strict=True)]
        half = len(totals) // 2
        most = max(totals[:half])
        return most, totals.index(most), max(totals[half:])

    def _learn(self, dp: int, tokens: float, stages: Sequence[StageMemory]) -> tuple[float, ...]:
        """Store the values of the stages: all terms of each, then states and activations of each."""
        states = [stage.states for stage in stages]
        constant = [stage.states + sum(stage.terms[name] for name in _CONSTANT) for stage in stages]
        fixed = (*(self._assumptions.measured * each for each in constant), *states)
        moving = (*(stage.total for stage in stages), *(stage.states + stage.activations for stage in stages))
        self._per_token = tuple([(total - a) / tokens for total, a in zip(moving, fixed, strict=True)])
        for other, others in self._fixed.items():
            slopes = [(y - z) / (1 / dp - 1 / other) for y, z in zip(fixed, others, strict=True)]
            self._line = tuple([(y - slope / dp, slope) for y, slope in zip(fixed, slopes, strict=True)])
        self._fixed[dp] = fixed
        return fixed


def _lengths(model: Architecture, layout: ParallelLayout) -> Hashable:
    """Return the lengths that memory depends on in addition to the tokens: none, for whole shares of a fused kernel."""
    tokens = layout.mbs * (layout.seq_length or model.seq_length)
    is_linear = layout.implementation is Implementation.FUSED and model.position_embedding_type != "learned_absolute"
    if not is_linear or tokens % (layout.cp * layout.tp):
        return layout.mbs, layout.seq_length or model.seq_length
    # a fully recomputed chunk keeps rotation angles of the sequence, whatever the number of sequences
    return layout.mbs if layout.recompute.granularity is Granularity.FULL else None


def _microbatches(layout: ParallelLayout) -> int:
    """Return a number of micro-batches with the same memory: further micro-batches repeat the schedule."""
    if layout.vp == 1 or layout.pp == 1:
        return min(layout.num_microbatches, layout.pp)
    groups, rest = divmod(layout.num_microbatches, layout.pp)
    return min(groups, _WHOLE_GROUPS if rest == 0 else _GROUPS) * layout.pp + rest
