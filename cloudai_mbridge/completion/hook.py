"""Notify about a run that has ended. Nothing here raises, waits long, or changes the exit code."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloudai_mbridge.completion.channels import start_all
from cloudai_mbridge.errors import InUse, MBridgeError, Paused, shortened
from cloudai_mbridge.metrics import MEASURES
from cloudai_mbridge.models.scenario import OnCompletion
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.report.model import RunReport, plain
from cloudai_mbridge.report.ranking import gpu_hours, rank
from cloudai_mbridge.report.text import count_text
from cloudai_mbridge.runner.interrupt import Detached, Interrupted, Interrupts
from cloudai_mbridge.training.credentials.scrub import redacted_in

LONGEST_S = 30.0
_SLICE_S = 0.05
_MOST_FASTEST = 3  # of each test


@contextlib.contextmanager
def completion(plan: ScenarioPlan, root: Path, note: Callable[[str], None]) -> Iterator[Callable[[RunReport], None]]:
    """Notify when the enclosed block ends, also if it fails. A run that another process holds, or that was
    left to its scheduler, has not ended.

    Yields a function that the block calls with the run's report, once it is written.
    note: receives a line about each failed notification.
    """
    report: RunReport | None = None

    def take_report(written: RunReport) -> None:
        nonlocal report
        report = written

    try:
        yield take_report
    except (InUse, Detached):
        raise
    except Exception as error:
        _tell(plan, root, report, error, note)
        raise
    _tell(plan, root, report, None, note)


def _tell(
    plan: ScenarioPlan, root: Path, report: RunReport | None, error: Exception | None, note: Callable[[str], None]
) -> None:
    if (asked := plan.runner.on_completion) is None:
        return
    try:
        body = json.dumps(body_of(plan.scenario, plan.system, root.absolute(), report, error), allow_nan=False).encode()
        for problem in _problems(asked, root.absolute(), body):
            note(shortened(f"note: on_completion: {problem}"))
    except Exception as defect:  # a failed notification must not change the run's result
        with contextlib.suppress(Exception):
            note(f"note: on_completion: {type(defect).__name__}")


def _problems(asked: OnCompletion, root: Path, body: bytes) -> list[str]:
    """Wait until all have ended, but not longer than `LONGEST_S` nor past a signal; return the problems."""
    end, why = time.monotonic() + LONGEST_S, f"has not ended in {LONGEST_S:g} s"
    with Interrupts() as interrupts:
        started = start_all(asked, root, body)
        try:
            while any(each.is_open for each in started) and time.monotonic() < end:
                interrupts.check()
                time.sleep(_SLICE_S)
        except Interrupted:
            why = "was stopped by a signal"
    return [problem for each in started if (problem := each.end(why))]


def body_of(
    scenario: str, system: str, root: Path, report: RunReport | None, error: Exception | None
) -> dict[str, Any]:
    """Return the message as plain data without credentials. Unknown values are null.

    report: None if none could be written. error: the error that ended the run before its points had ended.
    """
    if isinstance(error, Interrupted):
        state = "cancelled"
    elif isinstance(error, Paused):
        state = "paused"
    else:
        state = "success" if error is None and report is not None and report.succeeded else "failed"
    fastest = []
    for point in (point for test in rank(report) for point in test.points[:_MOST_FASTEST]) if report else ():
        statistics = {each.name: point.statistic(each.name) for each in MEASURES if each.is_statistic}
        values = {name: statistic.capped_mean if statistic else None for name, statistic in statistics.items()}
        fastest.append({"test": point.test_id, "point": point.label, **values, "runs": point.num_runs})
    body: dict[str, Any] = {
        "text": f"{scenario} on {system}: {state}{f': {count_text(report)}' if report else ''}",
        "run": root.name,
        "path": str(root),
        "scenario": scenario,
        "system": system,
        "state": state,
        "counts": report.counts if report else None,
        "fastest": fastest,
        "gpu_hours": gpu_hours(report.points) if report else None,
        "report": str(root / ROOT_FILES.report_html) if report else None,
        "error": None if error is None else str(error) if isinstance(error, MBridgeError) else type(error).__name__,
    }
    return dict(plain(redacted_in(body)))
