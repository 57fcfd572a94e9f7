"""report.txt: per run as CloudAI writes it, and a summary of the whole."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import MEASURES, Metrics, Statistic
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import PointReport, RunReport

_WORTH_SAYING = 0.01  # of the difference between the two means
_MOST, _MOST_PLACES = 1e9, 6
_CLOUDAI = ("step_time_s", "tflops_per_gpu")  # measures of its blocks


def render_point(point: PointReport, root: Path) -> str:
    """Render a run's report.txt: CloudAI's two blocks, followed by the facts that CloudAI omits."""
    log = root / point.key / POINT_FILES.stdout
    metrics = point.metrics
    lines = [f"Source log: {log}", ""]
    lines += ["Step Time (s)", *_statistic(metrics.step_time_s if metrics else None), ""]
    lines += ["TFLOP/s per GPU", *_statistic(metrics.tflops_per_gpu if metrics else None), ""]
    lines += [f"Steps counted: {window_text(point)}"]
    if metrics and metrics.step_time_s:
        capped = f"{metrics.step_time_s.capped_mean:.6g} s (a step counts as at most 1.1 x the median)"
        lines += [f"Capped mean step time: {capped}"]
    lines += list(_other_measures(metrics)) if metrics else []
    lines += [f"Verdict: {point.verdict}"]
    lines += [f"  - {reason}" for reason in point.reasons]
    if point.evidence:
        lines += ["Evidence:", *(f"  | {line}" for line in point.evidence)]
    if len(point.attempts) > 1:
        lines += ["Attempts:", *(f"  {attempt_text(attempt)}" for attempt in point.attempts)]
    return visible("\n".join(lines)) + "\n"


def _other_measures(metrics: Metrics) -> Iterator[str]:
    """Yield a line for each known measure that CloudAI's blocks lack."""
    for measure in MEASURES:
        value = None if measure.name in _CLOUDAI else getattr(metrics, measure.name)
        if value is not None:
            name = f"{measure.label[:1].upper()}{measure.label[1:]}"
            unit = f" {measure.unit}" if measure.unit not in ("", measure.label) else ""
            kind = f" ({metrics.memory_kind or 'of an unknown kind'})" if measure.name == "peak_memory_gib" else ""
            yield f"{name}: {measure_text(value)}{unit}{kind}"


def attempt_text(attempt: Mapping[str, Any]) -> str:
    """Return number, job, nodes and end of an attempt."""
    nodes = f" on {attempt['nodes']}" if attempt["nodes"] else ""
    why = attempt["failure"] or attempt["reason"]
    return f"{attempt['number']}: job {attempt['job_id']}{nodes}: {attempt['state']}{f', {why}' if why else ''}"


def _statistic(s: Statistic | None) -> list[str]:
    if s is None:
        return ["  not measured"]
    return [f"  avg: {s.mean}", f"  median: {s.median}", f"  min: {s.min}", f"  max: {s.max}", f"  std: {s.std}"]


def window_text(point: PointReport) -> str:
    """Return the steps of the statistics: "4-10 (n=7), warm-up 1-3 left out"."""
    m = point.metrics
    if m is None or m.window is None or m.step_time_s is None:
        return "none"
    left_out = f", warm-up 1-{m.warmup_steps} left out" if m.warmup_steps else ", no warm-up left out"
    return f"{m.window[0]}-{m.window[1]} (n={m.step_time_s.n}){left_out}"


def render_summary(report: RunReport) -> str:
    """Render the root's report.txt."""
    lines = [f"Scenario {report.scenario} on {report.system}: {count_text(report)}", ""]
    for point in report.points:
        lines.append(f"{point.key}: {point.verdict}{_numbers(point)}")
        lines += [f"  - {reason}" for reason in point.reasons]
    lines += [f"{point.name}: left out: {point.reason}" for point in report.left_out]
    lines += [f"node {node} was excluded: {reason}" for node, reason in report.excluded_nodes.items()]
    return visible("\n".join(lines)) + "\n"


def _numbers(point: PointReport) -> str:
    m = point.metrics
    if m is None or m.step_time_s is None:
        return ""
    rate = f"{m.tflops_per_gpu.capped_mean:.4g} TFLOP/s/GPU" if m.tflops_per_gpu else "TFLOP/s/GPU not measured"
    return f", step time {m.step_time_s.capped_mean:.4g} s, {rate}, steps {window_text(point)}"


def count_text(report: RunReport) -> str:
    counts = {**report.counts, **({"left out": len(report.left_out)} if report.left_out else {})}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def spread_text(s: Statistic | None) -> str:
    """Return the number that ranks points, and the plain mean if it is more than 1 % off."""
    if s is None:
        return "not measured"
    plain = "" if math.isclose(s.mean, s.capped_mean, rel_tol=_WORTH_SAYING) else f" (mean {s.mean:.4g})"
    return f"{with_error(s.capped_mean, s.capped_std)}{plain}"


def measure_text(value: Statistic | float | None) -> str:
    """Return a measure as a cell of a table."""
    if value is None or isinstance(value, Statistic):
        return spread_text(value)
    return f"{value:.4g}"


def with_error(value: float, error: float) -> str:
    """Return "5.190 ±0.031" or "310 ±120": an error with two digits, and the value to the same place."""
    if not (math.isfinite(value) and math.isfinite(error)) or max(abs(value), abs(error)) >= _MOST or error < 0:
        return f"{value:.4g} ±{error:.2g}"
    if error == 0:
        return f"{value:.4g} ±0"
    place = math.floor(math.log10(float(f"{error:.1e}"))) - 1
    if place < -_MOST_PLACES:  # far below any measured value
        return f"{value:.4g} ±{error:.1g}"
    return " ±".join(f"{round(number, -place):.{max(0, -place)}f}" for number in (value, error))


def evidence_title(point: PointReport) -> str:
    return str(point.failure["title"]) if point.failure else "the last lines of its logs"


def windows_text(report: RunReport) -> str:
    """Return the steps that the numbers of all points are means of."""
    windows = {window_text(point) for point in report.points if point.metrics and point.metrics.step_time_s}
    if len(windows) == 1:
        return f"capped mean ±std over steps {windows.pop()}"
    return "capped mean ±std over each run's steps after its warm-up, see report.txt"
