"""A report as text: report.txt, the facts of one run, and sentences shared by the terminal and the page."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import readable, visible
from cloudai_mbridge.metrics import MEASURES, Statistic, first_step
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.ranking import TestRanking, causes, excerpt, gpu_hours, rank
from cloudai_mbridge.verdict import Verdict

_WORTH_SAYING = 0.01  # of the difference between the two means
_MOST, _MOST_PLACES = 1e9, 6
_CLOUDAI = ("step_time_s", "tflops_per_gpu")  # measures of its blocks
_LAYOUT = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length")
_PREDICTED = {
    "step_time_s": "step time {:.4g} s",
    "tflops_per_gpu": "{:.4g} TFLOP/s/GPU",
    "peak_memory_gib": "memory {:.4g} GiB",
}
_WIDTH = 15
_MOST_NAMES = 3


def render_point(point: PointReport, root: Path) -> str:
    """Render a run's report.txt: CloudAI's two blocks, followed by the facts that CloudAI omits."""
    metrics = point.metrics
    lines = [f"Source log: {root / point.key / POINT_FILES.stdout}", ""]
    for title, name in (("Step Time (s)", "step_time_s"), ("TFLOP/s per GPU", "tflops_per_gpu")):
        s = getattr(metrics, name, None)
        numbers = {"avg": s.mean, "median": s.median, "min": s.min, "max": s.max, "std": s.std} if s else {}
        lines += [title, *([f"  {key}: {value}" for key, value in numbers.items()] or ["  not measured"]), ""]
    lines += [f"Steps counted: {window_text(point)}"]
    if metrics and metrics.step_time_s:
        capped = f"{metrics.step_time_s.capped_mean:.6g} s (a step counts as at most 1.1 x the median)"
        lines += [f"Step time: {capped}"]
    for measure in MEASURES if metrics else ():
        value = None if measure.name in _CLOUDAI else getattr(metrics, measure.name)
        if metrics and value is not None:
            name = f"{measure.label[:1].upper()}{measure.label[1:]}"
            unit = f" {measure.unit}" if measure.unit not in ("", measure.label) else ""
            kind = f" ({metrics.memory_kind or 'of an unknown kind'})" if measure.name == "peak_memory_gib" else ""
            lines.append(f"{name}: {measure_text(value)}{unit}{kind}")
    return visible("\n".join([*lines, *_result(point)])) + "\n"


def _result(point: PointReport) -> Iterator[str]:
    """Yield the verdict with its reasons and evidence, and the attempts if there were several."""
    yield f"Verdict: {point.verdict}"
    yield from (f"  - {reason}" for reason in point.reasons)
    for title, lines in (("Evidence", point.evidence), (_LAST_LINES.capitalize(), point.last_lines)):
        if lines:
            yield from (f"{title}:", *(f"  | {line}" for line in lines))
    if len(point.attempts) > 1:
        yield "Attempts:"
        for attempt in point.attempts:
            nodes = f" on {attempt['nodes']}" if attempt["nodes"] else ""
            why = attempt["failure"] or attempt["reason"]
            end = f"{attempt['state']}{f', {why}' if why else ''}"
            yield f"  {attempt['number']}: job {attempt['job_id']}{nodes}: {end}"


def window_text(point: PointReport) -> str:
    """Return the steps of the statistics: "4-10 (n=7), warm-up 1-3 left out"."""
    m = point.metrics
    if m is None or m.window is None or m.step_time_s is None:
        return "none"
    first = first_step(point.run, point.steps)
    left_out = [f"warm-up {first}-{m.warmup_steps}" if m.warmup_steps >= first else "no warm-up"]
    for reason in dict.fromkeys(step.left_out for step in point.steps if step.left_out):
        numbers = [step.step for step in point.steps if step.left_out == reason and step.step > m.warmup_steps]
        left_out += [f"{ranges(numbers)} {reason}"] if numbers else []
    return f"{m.window[0]}-{m.window[1]} (n={m.step_time_s.n}), {', '.join(left_out)} left out"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as "4-5 and 9"; of many, the first few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    more = [f"{len(texts) - _MOST_PLACES} more"] if len(texts) > _MOST_PLACES else []
    return " and ".join([*texts[:_MOST_PLACES], *more])


def render_summary(report: RunReport) -> str:
    """Render the root's report.txt."""
    lines = [f"Scenario {report.scenario} on {report.system}: {count_text(report)}", ""]
    for point in report.points:
        m, numbers = point.metrics, ""
        if m is not None and m.step_time_s is not None:
            flops = m.tflops_per_gpu
            rate = f"{flops.capped_mean:.4g} TFLOP/s/GPU" if flops else "TFLOP/s/GPU not measured"
            numbers = f", step time {m.step_time_s.capped_mean:.4g} s, {rate}, steps {window_text(point)}"
        lines.append(f"{point.key}: {point.verdict}{numbers}")
        lines += [f"  - {reason}" for reason in point.reasons]
    lines += [f"{point.name}: left out: {point.reason}" for point in report.left_out]
    lines += [f"node {node} was excluded: {reason}" for node, reason in report.excluded_nodes.items()]
    return visible("\n".join(lines)) + "\n"


def count_text(report: RunReport) -> str:
    counts = {**report.counts, **({"left out": len(report.left_out)} if report.left_out else {})}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def measure_text(value: Statistic | float | None) -> str:
    """Return a measure as a cell: of a statistic the number that ranks, and the plain mean if it is more than 1 % off.

    None is a missing statistic.
    """
    if value is None:
        return "not measured"
    if not isinstance(value, Statistic):
        return f"{value:.4g}"
    is_same = math.isclose(value.mean, value.capped_mean, rel_tol=_WORTH_SAYING)
    own = f"{value.capped_mean:.4g}" if value.n == 1 else with_error(value.capped_mean, value.capped_std)
    return own + ("" if is_same else f" (mean {value.mean:.4g})")


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


_LAST_LINES = "the last lines of its logs"


def failure_title(point: PointReport) -> str:
    return str(point.failure["title"]) if point.failure else _LAST_LINES


def shown_lines(point: PointReport, mark: str = "  | ") -> list[str]:
    """Return the lines to show below the title of a failed run: those that show its failure, then the last ones."""
    evidence, last = ([f"{mark}{line}" for line in lines] for lines in (point.evidence, point.last_lines))
    return [*evidence, *([f"{_LAST_LINES}:"] if last and point.failure else []), *last]


def windows_text(report: RunReport) -> str:
    """Return the steps that the numbers of all points are means of."""
    windows = {window_text(point) for point in report.points if point.metrics and point.metrics.step_time_s}
    if len(windows) == 1:
        return f"capped mean ±std over steps {windows.pop()}"
    return "capped mean ±std over each run's steps after its warm-up, see report.txt"


def fastest_text(ranking: TestRanking, is_one_of_several: bool) -> str:
    """Name a test's fastest point, if any, and the points within its noise."""
    best = ranking.best
    assert best is not None
    value = best.statistic(ranking.by)
    assert value is not None
    unit = "s a step" if ranking.by == "step_time_s" else "tokens/s/GPU"
    where = f" of {ranking.test_id}" if is_one_of_several else ""
    text = f"fastest{where}: {best.label}, {value.capped_mean:.4g} {unit}"
    return f"{text}; within noise of it: {_some([p.label for p in ranking.alike])}" if ranking.alike else text


def cost_text(report: RunReport) -> str:
    """Return the GPU time and cost of a run, "" for a run on CPUs."""
    hours = gpu_hours(report.points)
    devices = [str(point.environment.get("device")) for point in report.points if point.steps]
    is_on_cpus = devices and all(device.startswith("CPU") for device in devices)
    return f"{readable(hours, 3)} GPU-hours" if hours and not is_on_cpus else ""


def cause_text(points: Sequence[PointReport]) -> str:
    """Return the names of runs that did not succeed for one reason, and this reason."""
    return f"{_some([point.key for point in points])}: {'; '.join(points[0].reasons)}"


def rejected_text(report: RunReport) -> str:
    """Count the rejected points by rule."""
    rules = ", ".join(f"{rule} {count}" for rule, count in report.rule_counts.items())
    return f"{counted(report.num_rejected, 'point')}, by rule: {rules}"


def ending(report: RunReport) -> dict[str, Any]:
    """Return plain data: by (measure that ranks the tests' points), fastest, measured, cost, causes and rejected."""
    rankings = rank(report)
    return {
        "by": "step_time_s" if all(one.by == "step_time_s" for one in rankings) else "tokens_per_s_per_gpu",
        "fastest": [fastest_text(one, len(rankings) > 1) for one in rankings if one.best],
        "measured": windows_text(report) if rankings else "",
        "cost": cost_text(report),
        "causes": [
            {"verdict": str(points[0].verdict), "text": cause_text(points), "excerpt": list(excerpt(points[0]))}
            for points in causes(report)
        ],
        "rejected": rejected_text(report) if report.num_rejected else "",
    }


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def render_details(point: PointReport, root: Path) -> str:
    """Render the facts of a run for `mbridge show RUN POINT`, numbers rounded to their error."""
    lines = [f"{f'{name}:' if name else '':<{_WIDTH}}{text}" for name, text in _facts(point, root) if text]
    return visible("\n".join([*lines, f"Steps counted: {window_text(point)}", *_result(point)])) + "\n"


def _facts(point: PointReport, root: Path) -> Iterator[tuple[str, str]]:
    args, metrics, job = point.args, point.metrics, point.job
    yield "Model", " ".join(str(args[name]) for name in ("model_recipe_name", "compute_dtype") if args.get(name))
    yield "Layout", ", ".join(f"{name}={args[name]}" for name in _LAYOUT if args.get(name) is not None)
    if point.world_size is not None and point.num_nodes is not None:
        nodes = f": {job['nodes']}" if job.get("nodes") else ""
        yield "Ranks", f"{point.world_size} on {counted(point.num_nodes, 'node')}{nodes}"
    if job:
        code = f"exit code {job['exit_code']}" if job.get("exit_code") else ""
        ended = ", ".join(filter(None, (job.get("state"), code, job.get("reason"))))
        yield "Job", f"{job.get('job_id') or 'none'}, {ended}"
    names = {"submitted_at": "submitted", "started_at": "started", "ended_at": "ended"}
    times = [f"{verb} {str(job[name])[:19].replace('T', ' ')}" for name, verb in names.items() if job.get(name)]
    utc = " UTC" if times else ""
    verb = "running for" if point.verdict is Verdict.UNFINISHED and not job.get("ended_at") else "ran for"
    ran = [f"{verb} {job['run_time_s']:.0f} s"] if job.get("run_time_s") is not None else []
    yield "Times", ", ".join(filter(None, (", ".join(times) + utc, *ran)))
    yield "Step time", _statistic(metrics.step_time_s if metrics else None, "s")
    yield "Throughput", _statistic(metrics.tflops_per_gpu if metrics else None, "TFLOP/s/GPU")
    if metrics and metrics.tokens_per_s_per_gpu:
        yield "", _statistic(metrics.tokens_per_s_per_gpu, "tokens/s/GPU")
    if metrics and metrics.peak_memory_gib is not None:
        yield "Peak memory", f"{metrics.peak_memory_gib:.4g} GiB ({metrics.memory_kind or 'of an unknown kind'})"
    if metrics and metrics.last_loss is not None:
        first = "?" if metrics.first_loss is None else f"{metrics.first_loss:.4g}"
        yield "Loss", f"{first} → {metrics.last_loss:.4g}"
    predicted = ((text, (point.predicted or {}).get(name)) for name, text in _PREDICTED.items())
    yield "Predicted", ", ".join(text.format(value) for text, value in predicted if value is not None)
    yield from (("" if i else "Notes", note) for i, note in enumerate(point.log.get("notes", ())))
    yield "Log", str(root / (point.log.get("file") or f"{point.key}/{POINT_FILES.stdout}"))


def _statistic(s: Statistic | None, unit: str) -> str:
    """Return the number that ranks, then the spread of the steps."""
    if s is None:
        return "not measured"
    own = f"{s.capped_mean:.4g}" if s.n == 1 else with_error(s.capped_mean, s.capped_std)
    return f"{own} {unit} (median {s.median:.4g}, {s.min:.4g} to {s.max:.4g}, plain mean {s.mean:.4g})"
