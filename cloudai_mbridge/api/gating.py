"""Runs against a baseline, a history, or other runs."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.api.results import Run, path_of
from cloudai_mbridge.api.tables import Table, Tabular
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.gate.policy import GatePolicy, load_policy
from cloudai_mbridge.gate.runs import without_dry_runs
from cloudai_mbridge.gate.verdict import GateResult, MetricVerdict, PointVerdict

RunLike = Run | str | os.PathLike[str]
_COLUMNS = {
    **{"point": str, "point_verdict": str, "metric": str, "verdict": str, "decides": bool, "unit": str},
    **{"baseline": float, "value": float, "change": float, "change_low": float, "change_high": float},
    **{"confidence": float, "p_value": float, "adjusted_p": float, "detectable": float},
    **{"num_runs": int, "num_baseline_runs": int, "waived": str, "words": str},
}


def gate_runs(
    runs: RunLike | Sequence[RunLike], *, policy: str | os.PathLike[str], baseline: str | os.PathLike[str] | None = None
) -> "Gate":
    """Judge runs, taken together, against the baseline or the history that a policy names.

    baseline: a baseline file in its place.
    NonePromoted, a BadInput: the baseline's file has none yet. BadInput: a file cannot be read.
    """
    from cloudai_mbridge.gate.run import run_gate  # imports numpy and scipy, for this call only

    loaded = load_policy(Path(policy))
    if baseline is not None:
        loaded = replace(loaded, baseline_path=Path(baseline), history_path=None)
    given, skipped = without_dry_runs(_paths(runs))
    return Gate(**vars(run_gate(given, loaded, _today()).with_notes(skipped)))


def compare_runs(
    old: RunLike | Sequence[RunLike], new: RunLike | Sequence[RunLike], *, policy: str | os.PathLike[str] | None = None
) -> "Gate":
    """Judge runs against others. policy: source of metrics and limits; default: built-in.

    BadInput: a report cannot be read.
    """
    from cloudai_mbridge.gate.run import compare_reports

    terms = load_policy(Path(policy)).policy if policy else GatePolicy(name="built-in", baseline="-")
    return Gate(**vars(compare_reports(_paths(old), _paths(new), terms, _today())))


def _paths(runs: RunLike | Sequence[RunLike]) -> list[Path]:
    paths = [path_of(run) for run in ([runs] if isinstance(runs, Run | str | os.PathLike) else runs)]
    if not paths:
        raise BadInput("no runs are given; give at least one on each side")
    return paths


def _today() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True, repr=False)
class Gate(GateResult, Tabular):
    """Result of a gate: `verdict`, `points`, `notes` and more. Its table has a row per metric of a point.

    change: relative, 0.03 is 3 % more; change_low, change_high: its bounds, each one-sided at `confidence`. Of a point
    that could not be compared there is one row without a metric.
    """

    @property
    def table(self) -> Table:
        return Table(_COLUMNS, tuple(row for point in self.rows for row in _rows(point)))

    def __repr__(self) -> str:
        return f"<Gate {self.verdict}: {counted(len(self.points), 'point')} against {self.reference}>"


def _rows(point: PointVerdict) -> Iterator[dict[str, Any]]:
    names = {"point": point.point, "point_verdict": str(point.verdict)}
    if not point.metrics:
        yield names | {"words": "; ".join(point.words)}
    for metric in point.metrics:
        low, high = metric.interval or (None, None)
        yield names | _plain(metric) | {"change_low": low, "change_high": high}


def _plain(metric: MetricVerdict) -> dict[str, Any]:
    values = {name: value for name, value in vars(metric).items() if name in _COLUMNS}
    return values | {"verdict": str(metric.verdict), "waived": metric.waived or None, "unit": metric.unit or None}
