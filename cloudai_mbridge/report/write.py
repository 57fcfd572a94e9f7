"""Write a report into the directory of its run."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing, write_text
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.plan.read import require_directories
from cloudai_mbridge.report.html import log_links, render_html
from cloudai_mbridge.report.junit import render_junit
from cloudai_mbridge.report.markdown import render_markdown
from cloudai_mbridge.report.model import RunReport
from cloudai_mbridge.report.rows import write_steps_csv, write_steps_parquet
from cloudai_mbridge.report.text import render_point, render_summary
from cloudai_mbridge.verdict import Verdict

FindHistory = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]


def write_report(report: RunReport, root: Path, find_history: FindHistory = lambda report: ()) -> Path:
    """Write report.json, everything that is rendered from it, and a report.txt per run; return report.json's path.

    report.json comes first: it is the contract, and remains if the others fail. If a link has replaced a run's
    directory, nothing is written at all.

    find_history: returns the rows of earlier runs for the page, given the contents of report.json.
    """
    path, data = root / ROOT_FILES.report, report.to_dict()
    history = find_history(data)
    ran = [point for point in report.points if point.verdict is not Verdict.REJECTED]
    require_directories(root, [point.key for point in ran])
    write_json(data, path)
    for point in ran:
        (root / point.key).mkdir(parents=True, exist_ok=True)
        write_text(root / point.key / POINT_FILES.report, render_point(point, root))
    write_text(root / ROOT_FILES.summary, render_summary(report))
    write_text(root / ROOT_FILES.markdown, render_markdown(report))
    write_text(root / ROOT_FILES.junit, render_junit(report))
    write_steps_csv(report.points, root / ROOT_FILES.steps_csv)
    write_steps_parquet(report.points, root / ROOT_FILES.steps_parquet)
    page = root / ROOT_FILES.report_html
    write_text(page, render_html(data, history, logs=log_links(data, root, page)))
    return path


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write `Report.to_dict()`."""
    head = json.dumps({name: value for name, value in report.items() if name != "points"}, indent=1, allow_nan=False)
    points = report["points"]
    with replacing(path) as unfinished, unfinished.open("w", encoding="ascii", newline="\n") as file:
        file.write(head.removesuffix("\n}") + ',\n "points": [')
        for number, point in enumerate(points):
            file.write(("," if number else "") + "\n  " + json.dumps(point, allow_nan=False))
        file.write("\n ]\n}\n" if points else "]\n}\n")
