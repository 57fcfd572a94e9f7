"""Results of a run as sentences, shared by the terminal and the page."""

from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.report.formats.text import windows_text
from cloudai_mbridge.report.model import RunReport
from cloudai_mbridge.report.ranking import Cause, TestRanking, causes, gpu_hours, rank

_MOST_NAMES = 3


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
    return f"{hours:.3g} GPU-hours" if hours and not is_on_cpus else ""


def cause_text(cause: Cause) -> str:
    return f"{_some(cause.keys)}: {cause.reason}"


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
            {"verdict": str(cause.verdict), "text": cause_text(cause), "excerpt": list(cause.excerpt)}
            for cause in causes(report)
        ],
        "rejected": rejected_text(report) if report.num_rejected else "",
    }


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
