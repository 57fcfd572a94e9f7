"""Everything about one run of a point, for `mbridge show RUN POINT`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import Statistic
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.formats.text import attempt_text, window_text, with_error
from cloudai_mbridge.report.model import PointReport

_LAYOUT = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length")
_PREDICTED = {
    "step_time_s": "step time {:.4g} s",
    "tflops_per_gpu": "{:.4g} TFLOP/s/GPU",
    "peak_memory_gib": "memory {:.4g} GiB",
}
_WIDTH = 15


def render_details(point: PointReport, root: Path) -> str:
    """Render the facts of a run, numbers rounded to their error."""
    lines = [f"{f'{name}:' if name else '':<{_WIDTH}}{text}" for name, text in _facts(point, root) if text]
    lines += [f"Steps counted: {window_text(point)}", f"Verdict: {point.verdict}"]
    lines += [f"  - {reason}" for reason in point.reasons]
    if point.evidence:
        lines += ["Evidence:", *(f"  | {line}" for line in point.evidence)]
    if len(point.attempts) > 1:
        lines += ["Attempts:", *(f"  {attempt_text(attempt)}" for attempt in point.attempts)]
    return visible("\n".join(lines)) + "\n"


def _facts(point: PointReport, root: Path) -> Iterator[tuple[str, str]]:
    args, metrics = point.args, point.metrics
    yield "Model", " ".join(str(args[name]) for name in ("model_recipe_name", "compute_dtype") if args.get(name))
    yield "Layout", ", ".join(f"{name}={args[name]}" for name in _LAYOUT if args.get(name) is not None)
    yield "Ranks", _ranks(point)
    yield "Job", _job(point.job)
    yield "Times", _times(point.job)
    yield "Step time", _statistic(metrics.step_time_s if metrics else None, "s")
    yield "Throughput", _statistic(metrics.tflops_per_gpu if metrics else None, "TFLOP/s/GPU")
    if metrics and metrics.tokens_per_s_per_gpu:
        yield "", _statistic(metrics.tokens_per_s_per_gpu, "tokens/s/GPU")
    if metrics and metrics.peak_memory_gib is not None:
        yield "Peak memory", f"{metrics.peak_memory_gib:.4g} GiB ({metrics.memory_kind or 'of an unknown kind'})"
    if metrics and metrics.last_loss is not None:
        first = "?" if metrics.first_loss is None else f"{metrics.first_loss:.4g}"
        yield "Loss", f"{first} → {metrics.last_loss:.4g}"
    yield "Predicted", _predicted(point.predicted or {})
    yield "Log", str(root / (point.log.get("file") or f"{point.key}/{POINT_FILES.stdout}"))


def _ranks(point: PointReport) -> str:
    if point.world_size is None or point.num_nodes is None:
        return ""
    nodes = point.job.get("nodes")
    return f"{point.world_size} on {counted(point.num_nodes, 'node')}{f': {nodes}' if nodes else ''}"


def _job(job: Mapping[str, Any]) -> str:
    if not job:
        return ""
    code = job.get("exit_code")
    parts = (job.get("state"), f"exit code {code}" if code else "", job.get("reason"))
    return f"{job.get('job_id') or 'none'}, {', '.join(filter(None, parts))}"


def _times(job: Mapping[str, Any]) -> str:
    names = {"submitted_at": "submitted", "started_at": "started", "ended_at": "ended"}
    texts = [f"{verb} {str(job[name])[:19].replace('T', ' ')}" for name, verb in names.items() if job.get(name)]
    if texts:
        texts[-1] += " UTC"
    if (run_time := job.get("run_time_s")) is not None:
        texts.append(f"ran for {run_time:.0f} s")
    return ", ".join(texts)


def _statistic(s: Statistic | None, unit: str) -> str:
    if s is None:
        return "not measured"
    return f"{with_error(s.mean, s.std)} {unit} (median {s.median:.4g}, {s.min:.4g} to {s.max:.4g})"


def _predicted(predicted: Mapping[str, Any]) -> str:
    known = ((text, predicted.get(name)) for name, text in _PREDICTED.items())
    return ", ".join(text.format(value) for text, value in known if value is not None)
