"""Verdicts of a gate, per metric, per point and overall."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class GateVerdict(StrEnum):
    """PASS and IMPROVEMENT are green; everything else is not.

    INCONCLUSIVE: too few runs, or too noisy. NOT_RUN: a result is missing, or its run failed.
    NOT_COMPARABLE: there is nothing that it may be compared with.
    """

    PASS = "pass"  # noqa: S105 - no password
    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    NOT_RUN = "not run"


GREEN = frozenset({GateVerdict.PASS, GateVerdict.IMPROVEMENT})
# The worst first: good metrics do not outweigh a bad metric
EXIT_CODES: Mapping[GateVerdict, int] = {
    GateVerdict.REGRESSION: 10,
    GateVerdict.NOT_RUN: 11,
    GateVerdict.NOT_COMPARABLE: 12,
    GateVerdict.INCONCLUSIVE: 13,
    GateVerdict.IMPROVEMENT: 0,
    GateVerdict.PASS: 0,
}
IMPROVEMENT_EXIT_CODE = 14  # if the policy makes an improvement fail


def worst(verdicts: Iterable[GateVerdict]) -> GateVerdict:
    """Return the deciding verdict; NOT_RUN without any verdict."""
    found = set(verdicts)
    return next((verdict for verdict in EXIT_CODES if verdict in found), GateVerdict.NOT_RUN)


@dataclass(frozen=True)
class MetricVerdict:
    """One metric of one point.

    words: one sentence with the numbers. decides: False if it is shown only.
    change: relative change to the baseline, positive = larger (0.03 is 3 % more); None if it could not be compared.
    interval: the lower and the upper bound of it, each one-sided at `confidence`. p_value: of no change for the worse,
    before the correction; adjusted_p: after it. detectable: the change for the worse that the comparison would call a
    regression in 80 of 100 cases.
    waived: the reason and expiry of the waiver that took a regression out.
    is_significant: whether a change beyond the margin is significant after the correction.
    baseline_noise, noise: relative standard deviations between runs, None for one run.
    """

    metric: str
    verdict: GateVerdict
    words: str
    unit: str = ""
    decides: bool = True
    baseline: float | None = None
    value: float | None = None
    change: float | None = None
    interval: tuple[float, float] | None = None
    confidence: float | None = None
    p_value: float | None = None
    adjusted_p: float | None = None
    detectable: float | None = None
    num_runs: int = 0
    num_baseline_runs: int = 0
    waived: str = ""
    is_significant: bool = False
    baseline_noise: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class PointVerdict:
    """One point: its metrics, and findings on the whole point (failed runs, a missing baseline)."""

    point: str
    verdict: GateVerdict
    words: tuple[str, ...]
    metrics: tuple[MetricVerdict, ...] = ()
    runs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlowNode:
    """A node that makes the runs on it slower. effect, interval: relative, of 95 %."""

    node: str
    effect: float
    interval: tuple[float, float]
    runs: int


@dataclass(frozen=True)
class GateResult:
    """The whole. false_alarm_rate: the highest probability of a regression in the verdict without any change.

    shared: what all points changed by, and groups of them, where there are enough points to tell. slow_nodes: nodes
    whose effect was taken out of the comparisons.
    notes: for the reader, such as expired waivers and excluded runs. reference: name of the reference.
    environment_changes: fact -> (in the reference, in the result), for facts known to both.
    """

    policy: str
    reference: str
    verdict: GateVerdict
    points: tuple[PointVerdict, ...]
    false_alarm_rate: float
    notes: tuple[str, ...] = ()
    environment_changes: Mapping[str, Any] = field(default_factory=dict)
    improvement_fails: bool = False
    shared: tuple[PointVerdict, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()

    @property
    def rows(self) -> tuple[PointVerdict, ...]:
        """Rows of the shared changes, then of the points."""
        return (*self.shared, *self.points)

    def with_notes(self, notes: Iterable[str]) -> "GateResult":
        return replace(self, notes=(*self.notes, *notes))

    @property
    def exit_code(self) -> int:
        if self.verdict is GateVerdict.IMPROVEMENT and self.improvement_fails:
            return IMPROVEMENT_EXIT_CODE
        return EXIT_CODES[self.verdict]


def percent(x: float) -> str:
    return f"{100 * x:+.2f} %"
