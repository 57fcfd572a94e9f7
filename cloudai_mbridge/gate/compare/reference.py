"""Reference of a comparison: the good runs of one point, from a baseline, the history or a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS

Values = tuple[float, ...]


@dataclass(frozen=True)
class RunValues:
    """One run's metrics by name: a number, or several for a curve. Missing measurements are absent."""

    run_id: str
    values: Mapping[str, Values]
    ended_at: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReferencePoint:
    """The runs of one point that a result is compared with.

    bounds: metric -> (lower, upper), the relative changes within which it passes, instead of the policy's tolerance.
    """

    point: str
    comparability_id: str
    comparability: Mapping[str, Any]
    flops_formula: str | None
    flops_per_step: float | None
    runs: tuple[RunValues, ...]
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


def run_values(run: RunResult) -> RunValues:
    """Extract the metrics of a run."""
    values = {name: value for name, metric in METRICS.items() if (value := metric.of(run)) is not None}
    return RunValues(run.run_id, values, run.ended_at, run.nodes)


def reference_from_runs(runs: Sequence[RunResult]) -> ReferencePoint:
    """Build a reference from the good runs of one point and one key. At least one run is required.

    If they counted FLOPs by different formulas, the reference has no formula.
    """
    first = runs[0]
    formulas = {(run.flops_formula, run.flops_per_step) for run in runs}
    formula, flops = formulas.pop() if len(formulas) == 1 else (None, None)
    return ReferencePoint(
        point=first.point,
        comparability_id=first.comparability_id,
        comparability=first.comparability,
        flops_formula=formula,
        flops_per_step=flops,
        runs=tuple(run_values(run) for run in runs if run.is_success),
        environment=first.environment,
    )
