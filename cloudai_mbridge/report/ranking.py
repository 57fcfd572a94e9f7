"""Results of a run: its points, repeats combined, fastest first, and failures grouped by cause."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cloudai_mbridge.metrics import MEASURES, Statistic
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.verdict import Verdict

_NO_CAUSE = (Verdict.SUCCESS, Verdict.REJECTED, Verdict.UNFINISHED)


@dataclass(frozen=True)
class PointSummary:
    """A point that succeeded at least once. A statistic is over its runs; of a single run, over its steps.

    num_good, num_runs: its successful runs, and all of them. measures: by field of `Metrics`.
    """

    test_id: str
    label: str
    num_good: int
    num_runs: int
    measures: Mapping[str, Any]
    tokens_per_step: float | None

    @property
    def step_time_s(self) -> Statistic | None:
        return self.statistic("step_time_s")

    @property
    def tflops_per_gpu(self) -> Statistic | None:
        return self.statistic("tflops_per_gpu")

    @property
    def tokens_per_s_per_gpu(self) -> Statistic | None:
        return self.statistic("tokens_per_s_per_gpu")

    @property
    def last_loss(self) -> float | None:
        loss: float | None = self.measures["last_loss"]
        return loss

    def statistic(self, name: str) -> Statistic | None:
        found: Statistic | None = self.measures[name]
        return found


@dataclass(frozen=True)
class TestRanking:
    """The points of a test, the fastest first.

    by: "step_time_s", or "tokens_per_s_per_gpu" where the points' steps have different numbers of tokens. alike: the
    points after the first that are at most as far from it as the larger of the two capped standard deviations.
    """

    test_id: str
    by: str
    points: tuple[PointSummary, ...]
    alike: tuple[PointSummary, ...]

    @property
    def best(self) -> PointSummary | None:
        """The fastest of several points; None if only one point was measured."""
        measured = [point for point in self.points if point.statistic(self.by) is not None]
        return measured[0] if len(measured) > 1 else None


def rank(report: RunReport) -> list[TestRanking]:
    """Return the tests with points that succeeded, in the report's order."""
    by_test: dict[str, dict[str, list[PointReport]]] = {}
    for point in report.points:
        if point.verdict is not Verdict.REJECTED and not point.is_pre_test:
            by_test.setdefault(point.test_id, {}).setdefault(point.label, []).append(point)
    found = ([_summary(runs) for runs in points.values()] for points in by_test.values())
    good = ([point for point in points if point.num_good] for points in found)
    return [_ranking(points) for points in good if points]


def causes(report: RunReport) -> list[list[PointReport]]:
    """Return the runs that did not succeed, by verdict and reason, the most frequent first.

    Slow or too large trials of a search are excluded.
    """
    groups: dict[tuple[Verdict, str], list[PointReport]] = {}
    for point in report.points:
        if point.verdict not in _NO_CAUSE and not report.tells_search(point):
            reason = str(point.failure["id"]) if point.failure else "; ".join(point.reasons)
            groups.setdefault((point.verdict, reason), []).append(point)
    return sorted(groups.values(), key=lambda points: -len(points))


def gpu_hours(points: Iterable[PointReport]) -> float:
    """Return the GPU-hours of the jobs of runs, failed attempts included; of whole nodes where a job took these.

    Reports of earlier releases lack the number of GPUs of a job: it counts one for each rank.
    """
    return math.fsum(
        (attempt.get("gpus") or point.world_size or 0) * (attempt.get("run_time_s") or 0.0) / 3600
        for point in points
        for attempt in point.attempts
    )


def _summary(runs: Sequence[PointReport]) -> PointSummary:
    succeeded = [run for run in runs if run.verdict is Verdict.SUCCESS]
    measured = [(run.world_size, run.metrics) for run in succeeded if run.metrics]
    good = [metrics for _, metrics in measured]
    per_step = {
        size * metrics.tokens_per_step_per_gpu for size, metrics in measured if size and metrics.tokens_per_step_per_gpu
    }
    return PointSummary(
        test_id=runs[0].test_id,
        label=runs[0].label,
        num_good=len(succeeded),
        num_runs=len(runs),
        measures={each.name: each.over_runs([getattr(metrics, each.name) for metrics in good]) for each in MEASURES},
        tokens_per_step=per_step.pop() if len(per_step) == 1 else None,
    )


def _ranking(points: list[PointSummary]) -> TestRanking:
    has_tokens = any(point.tokens_per_s_per_gpu for point in points)
    by_rate = has_tokens and len({point.tokens_per_step for point in points}) > 1
    by, sign = ("tokens_per_s_per_gpu", -1) if by_rate else ("step_time_s", 1)

    def place(point: PointSummary) -> float:
        found = point.statistic(by)
        return math.inf if found is None else sign * found.capped_mean

    ranked = sorted(points, key=place)
    best = ranked[0].statistic(by)
    alike = []
    for point in ranked[1:]:
        other = point.statistic(by)
        if best and other:
            difference = abs(other.capped_mean - best.capped_mean)
            alike += [point] if difference <= max(best.capped_std, other.capped_std) else []
    return TestRanking(points[0].test_id, by, tuple(ranked), tuple(alike))


def excerpt(point: PointReport) -> tuple[str, ...]:
    """Return the lines of a run's logs that explain most.

    They are the first one that shows a known failure, or where each rank hung; else the last two.
    """
    if not point.failure:
        return (point.last_lines or point.evidence)[-2:]  # an earlier report has both in `evidence`
    stacks = (line for line in point.evidence if line.startswith("stacks/"))
    innermost = {name: next(lines) for name, lines in groupby(stacks, lambda line: line.partition(":")[0])}
    return tuple(innermost.values()) or point.evidence[:1]
