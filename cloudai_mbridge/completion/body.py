"""Message about a run that has ended, as JSON and in one line."""

from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import MBridgeError, Paused
from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.metrics import MEASURES
from cloudai_mbridge.report.model import RunReport, plain
from cloudai_mbridge.report.ranking import PointSummary, gpu_hours, rank
from cloudai_mbridge.report.text import count_text
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.training.credentials.scrub import redacted_in

_MOST_FASTEST = 3  # of each test


def body_of(
    scenario: str, system: str, root: Path, report: RunReport | None, error: Exception | None
) -> dict[str, Any]:
    """Return plain data without credentials. Unknown values are null.

    report: None if none could be written. error: the error that ended the run before its points had ended.
    """
    state = _state(report, error)
    counts = f": {count_text(report)}" if report else ""
    body: dict[str, Any] = {
        "text": f"{scenario} on {system}: {state}{counts}",
        "run": root.name,
        "path": str(root),
        "scenario": scenario,
        "system": system,
        "state": state,
        "counts": report.counts if report else None,
        "fastest": [_point(point) for test in rank(report) for point in test.points[:_MOST_FASTEST]] if report else [],
        "gpu_hours": gpu_hours(report.points) if report else None,
        "report": str(root / ROOT_FILES.report_html) if report else None,
        "error": None if error is None else str(error) if isinstance(error, MBridgeError) else type(error).__name__,
    }
    return dict(plain(redacted_in(body)))


def _state(report: RunReport | None, error: Exception | None) -> str:
    if isinstance(error, Interrupted):
        return "cancelled"
    if isinstance(error, Paused):
        return "paused"
    return "success" if error is None and report is not None and report.succeeded else "failed"


def _point(point: PointSummary) -> dict[str, Any]:
    statistics = {each.name: point.statistic(each.name) for each in MEASURES if each.is_statistic}
    values = {name: statistic.capped_mean if statistic else None for name, statistic in statistics.items()}
    return {"test": point.test_id, "point": point.label, **values, "runs": point.num_runs}
