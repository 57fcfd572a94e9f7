"""Write a report into the directory of its run."""

import json
from pathlib import Path

from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.report.model import Report
from cloudai_mbridge.report.text import render_point, render_summary
from cloudai_mbridge.verdict import Verdict


def write_report(report: Report, root: Path) -> Path:
    """Write report.json and report.txt, and a report.txt per run; return the path of report.json."""
    for point in report.points:
        if point.verdict is not Verdict.REJECTED:
            (root / point.key).mkdir(parents=True, exist_ok=True)
            (root / point.key / POINT_FILES.report).write_text(render_point(point, root), encoding="utf-8")
    (root / ROOT_FILES.summary).write_text(render_summary(report), encoding="utf-8")
    path = root / ROOT_FILES.report
    path.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
