"""Run a gate: read the results, find their references, judge."""

import os
import shlex
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path

from cloudai_mbridge.errors import BadInput, NonePromoted, counted
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.comparison import ComparisonTable, tabulate
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.levels import MIN_DRIFT_RUNS
from cloudai_mbridge.gate.policy import GatePolicy, LoadedPolicy
from cloudai_mbridge.gate.runs import (
    ReferencePoint,
    RunResult,
    group_by_point,
    read_results,
    reference_from_runs,
    runs_of,
)
from cloudai_mbridge.gate.trend import LAST, Effect, find_trend
from cloudai_mbridge.gate.verdict import GateResult, percent
from cloudai_mbridge.metrics import PRIMARY
from cloudai_mbridge.report.read import read_report

LONGEST_WITHOUT = timedelta(days=31)  # before a first baseline is required


def run_gate(paths: Sequence[Path], policy: LoadedPolicy, today: date, num_judgements: int = 1) -> GateResult:
    """Judge the reports of the same benchmark, taken together, against the policy's baseline or history.

    NonePromoted: no baseline has been promoted yet. BadInput: a report, the baseline or the history cannot be read.
    """
    reports = [read_report(path) for path in paths]
    results = [run for report, file in reports for run in runs_of(report, file)]
    left_out = {point.name: point.reason for report, _ in reports for point in report.left_out}
    if (path := policy.baseline_path) is not None:
        references, where = _from_baseline(path, policy.path, results, today), f"baseline {path.name}"
    else:
        path, history = policy.history_path, policy.policy.history
        assert path is not None  # a policy names a baseline or a history
        assert history is not None
        references, where = _from_history(path, history.last, results), f"history {path.name}"
    judged = judge_results(
        policy.policy, references, results, where=where, today=today, num_judgements=num_judgements, left_out=left_out
    )
    return judged.with_notes(_drifts(path, references) if policy.baseline_path is None else ())


def _drifts(path: Path, references: Sequence[ReferencePoint]) -> Iterator[str]:
    """Yield a note per point that gets slower little by little: the last runs follow it, so no night is slower."""
    with History(path) as history:
        for reference in references:
            series = history.series(reference.comparability_id, PRIMARY, LAST)
            if len(series.runs) < MIN_DRIFT_RUNS:
                continue
            trend = find_trend(series)
            steps = [*takewhile(lambda c: c.effect is Effect.WORSE and c.is_level, reversed(trend.changes))]
            if trend.drift is not None and trend.drift.effect is Effect.WORSE:
                run, change = trend.drift.run, f"drifts by {percent(trend.drift.per_100_runs)} per 100 runs"
            elif len(steps) > 1:
                run, change = (
                    steps[-1].run,
                    f"rose by {percent(steps[0].after / steps[-1].before - 1)} in {len(steps)} steps",
                )
            else:
                continue
            why = "a gate against the last runs follows it; see mbridge history trend"
            yield f"{reference.point}: {PRIMARY} {change} since {run.ended_at[:10]}; {why}"


def compare_reports(
    old: Sequence[Path], new: Sequence[Path], policy: GatePolicy, today: date, metric: str | None = None
) -> tuple[GateResult, ComparisonTable | None]:
    """Judge the reports of one side against the reports of another, and return the table of a metric, None without one.

    BadInput: a report cannot be read.
    """
    before, after = ([run for path in paths for run in read_results(path)] for paths in (old, new))
    points, notes = group_by_point(before)
    by_work: dict[tuple[str, str], list[RunResult]] = {}
    for run in (run for point in points for run in point.good):
        by_work.setdefault((run.point, run.comparability_id), []).append(run)
    references = [reference_from_runs(runs) for runs in by_work.values()]
    notes += [
        f"{point.point}: {counted(len(point.failed), 'run')} of {point.failed[0][0].source} failed"
        for point in points
        if point.failed
    ]
    where = " ".join(map(str, old))
    result = judge_results(policy, references, after, where=where, today=today).with_notes(notes)
    return result, None if metric is None else tabulate(result, metric, before, after)


def _from_baseline(path: Path, policy: Path, results: Sequence[RunResult], today: date) -> Sequence[ReferencePoint]:
    """Return the references of a baseline. Errors name the command that makes a first baseline.

    NonePromoted: the baseline marks itself as not promoted yet, and its deadline has not passed.
    BadInput: it cannot be read, or is missing.
    """
    sources = shlex.join(dict.fromkeys(run.source for run in results)) or "RUN..."
    remedy = (
        f"make the first of good runs with: mbridge baseline promote {sources}"
        f" --baseline {shlex.quote(os.path.normpath(path))} --policy {shlex.quote(str(policy))}"
        ' --reason "first baseline"'
    )
    if not path.exists():
        raise BadInput(f"{path}: there is no baseline yet, so nothing to compare with; {remedy}")
    baseline = load_baseline(path)
    if (last := baseline.none_until) is None:
        return baseline.references()
    if last > today + LONGEST_WITHOUT:
        most = LONGEST_WITHOUT.days
        raise BadInput(
            f"{path}: none_until: {last} is more than {most} days ahead; a gate waits no longer for a baseline"
        )
    if last < today:
        raise BadInput(f"{path}: no baseline was promoted until {last}, so nothing is compared; {remedy}")
    raise NonePromoted(f"{path}: no baseline has been promoted yet, and one must be by {last}; {remedy}")


def _from_history(path: Path, last: int, results: Sequence[RunResult]) -> list[ReferencePoint]:
    """Return the last good runs of every point in the results, without these results.

    Points of the scenario's last report that are missing from the results get a reference, too: they were not run.
    """
    own = {run.run_id for run in results}
    found: dict[str, ReferencePoint] = {}
    with History(path) as history:
        for run in results:
            if run.point in found:
                continue
            # The same point, else the same work under another name, else the point's earlier work
            reference = history.reference_for(run.point, last, without=own)
            if reference is None or reference.comparability_id != run.comparability_id:
                reference = history.reference(run.comparability_id, last, without=own) or reference
            if reference is not None:
                found[run.point] = reference
        for scenario, system in {(run.scenario, run.system) for run in results}:
            for point in history.points_expected(scenario, system, without=own):
                if point not in found and (reference := history.reference_for(point, last, without=own)) is not None:
                    found[point] = reference
    return list(found.values())
