"""Promote runs to the baseline of their points: all or none, and a regression only with an explicit option."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline.file import read_bytes, render_baseline
from cloudai_mbridge.gate.baseline.model import (
    Baseline,
    BaselineMetric,
    BaselinePoint,
    BaselineRun,
    Bounds,
    Value,
    value_to_toml,
)
from cloudai_mbridge.gate.baseline.promotion_rules import (
    Limits,
    lowered,
    objections,
    regressions,
    with_anchors,
    within_a_day,
)
from cloudai_mbridge.gate.baseline.read import BASELINE_VERSION, load_baseline, summarize_environments, summarize_metric
from cloudai_mbridge.gate.compare.groups import changed, name_changes
from cloudai_mbridge.gate.compare.policy import MetricPolicy, default_metrics, matches
from cloudai_mbridge.gate.compare.reference import run_values
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS


@dataclass(frozen=True)
class Terms:
    """Author, time (UTC, ISO 8601), reason and accepted exceptions of a promotion.

    accept_regression: worse than the baseline that is there. accept_change: other work under the same name.
    """

    by: str
    at: str
    reason: str
    limits: Limits = field(default_factory=Limits)
    metrics: Sequence[MetricPolicy] = field(default_factory=default_metrics)
    accept_regression: bool = False
    accept_change: bool = False


@dataclass(frozen=True)
class Proposal:
    """A promotion before it is written. old: the file as it was read, None without one. refusals: point -> why."""

    path: Path
    old: bytes | None
    new: bytes
    points: tuple[str, ...]
    refusals: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]


def select(results: Sequence[RunResult], globs: Sequence[str]) -> dict[str, list[RunResult]]:
    """Return the runs of each point whose name matches a pattern, or of all points without patterns.

    BadInput: no runs, or a pattern without a match.
    """
    points: dict[str, list[RunResult]] = {}
    for run in results:
        points.setdefault(run.point, []).append(run)
    if not points:
        raise BadInput("the results hold no run; give reports of runs that were not rejected")
    for glob in globs:
        if not any(matches(glob, point) for point in points):
            raise BadInput(f"--point {glob!r}: matches no point; there are {', '.join(map(repr, points))}")
    return {point: runs for point, runs in points.items() if not globs or any(matches(glob, point) for glob in globs)}


def propose(path: Path, points: Mapping[str, Sequence[RunResult]], terms: Terms) -> Proposal:
    """Merge the points into the existing baseline. With a refusal nothing may be written.

    BadInput: the existing baseline cannot be read.
    """
    old = read_bytes(path)
    baseline = Baseline(version=BASELINE_VERSION) if old is None else load_baseline(path)
    refusals, notes, promoted = {}, [], {point.point: point for point in baseline.points}
    for name, runs in points.items():
        reasons = objections(runs, terms.limits)
        if not reasons:
            point, own_notes = _build(runs, terms)
            notes += [f"{name}: {note}" for note in own_notes]
            found = [each for each in baseline.points if each.comparability_id == point.comparability_id]
            # Prefer the point of this name
            same_work = min(found, key=lambda each: each.point != name, default=None)
            point, reasons = _in_place_of(baseline.point(name), same_work, point, terms)
            promoted[name] = point
            if same_work is not None and same_work.point not in points:
                promoted.pop(same_work.point, None)
        if reasons:
            refusals[name] = reasons
    text = render_baseline(Baseline(version=BASELINE_VERSION, points=list(promoted.values())))
    return Proposal(path, old, text.encode(), tuple(points), refusals, (*lowered(terms.limits), *notes))


def _build(runs: Sequence[RunResult], terms: Terms) -> tuple[BaselinePoint, list[str]]:
    """Build a point from its runs, with notes for the promoter."""
    environment, notes = summarize_environments([run.environment for run in runs])
    first, kept = runs[0], [_run(run) for run in runs]
    names = [name for name in METRICS if name in kept[0].values]
    limits = {metric.name: metric for metric in terms.metrics}
    metrics = [_metric(name, [run.values[name] for run in kept], limits.get(name)) for name in names]
    comparability = {name: value_to_toml(value) for name, value in first.comparability.items()}  # as in a file
    try:
        point = BaselinePoint(
            point=first.point,
            comparability_id=first.comparability_id,
            flops_formula=first.flops_formula,
            flops_per_step=first.flops_per_step,
            promoted_by=terms.by,
            promoted_at=terms.at,
            reason=terms.reason,
            metrics=metrics,
            runs=kept,
            comparability=comparability,
            environment=environment,
        )
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(map(str, mistake["loc"]))
        raise BadInput(
            f"{first.point!a}: {where}: {mistake['msg']}; no baseline can hold what its report says"
        ) from None
    if len({run.nodes for run in runs}) == 1:
        notes.append("all runs are of the same nodes, so the noise between nodes is not in it")
    if within_a_day([run.ended_at for run in runs]):
        notes.append("all runs ended within a day, so the noise between days is not in it")
    return point, notes


def _in_place_of(
    old: BaselinePoint | None, same_work: BaselinePoint | None, new: BaselinePoint, terms: Terms
) -> tuple[BaselinePoint, list[str]]:
    """Return the new point with the anchors of the baseline point of the same work, and the refusals.

    old: the baseline point of the same name.
    """
    changes, worse, point = [], dict[str, str](), new
    if old is not None and old.comparability_id != new.comparability_id:
        differing = name_changes(changed(old.comparability, new.comparability))
        changes.append(f"is different work from the baseline's: {differing}")
    if same_work is not None:
        worse = regressions(same_work, new, terms.metrics)
        point = with_anchors(same_work, new, worse)
        if same_work.point != new.point:
            changes.append(f"is the work of the baseline's {same_work.point!r} under another name")
    refused = [] if terms.accept_change else [f"{text}; --accept-change puts it there instead" for text in changes]
    if not terms.accept_regression:
        refused += [f"{text}; --accept-regression allows it" for text in worse.values()]
    return point.model_copy(update={"accepted": [*changes, *worse.values()]}), refused


def _run(run: RunResult) -> BaselineRun:
    values = {name: list(v) if len(v) > 1 else v[0] for name, v in run_values(run).values.items()}
    return BaselineRun(run_id=run.run_id, ended_at=run.ended_at, nodes=list(run.nodes), values=values)


def _metric(name: str, values: Sequence[Value], policy: MetricPolicy | None) -> BaselineMetric:
    value, noise = summarize_metric(values)
    return BaselineMetric(
        name=name,
        unit=METRICS[name].unit,
        direction=METRICS[name].direction,
        value=value,
        noise=noise,
        n=len(values),
        bounds=Bounds(lower=-policy.tolerance, upper=policy.tolerance) if policy else None,
        anchor=value,
    )


def difference(proposal: Proposal) -> list[str]:
    """Return the lines of the file's unified diff; if nothing changes, a single line with that message."""
    old = (proposal.old or b"").decode(errors="replace")
    before = str(proposal.path) if proposal.old is not None else "/dev/null"
    pair = _lines(old), _lines(proposal.new.decode())
    lines = list(difflib.unified_diff(*pair, before, str(proposal.path), lineterm=""))
    return lines or [f"{proposal.path}: would not change"]


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as TOML does; Python would split at more characters."""
    return text.removesuffix("\n").split("\n") if text else []
