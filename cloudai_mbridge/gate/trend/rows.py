"""The earlier runs of a report's points, as rows for the report's page."""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.gate.history.store import DEFAULT_METRIC, History, StoredRun
from cloudai_mbridge.gate.results.model import SUCCESS
from cloudai_mbridge.gate.trend.analysis import find_trend
from cloudai_mbridge.gate.trend.words import story

LAST = 500


def history_rows(history: History, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last good runs of every comparability key of a report, with where their step time moved.

    report: as report.json has it.

    Raises:
        BadInput: the history cannot be read.
    """
    keys = dict.fromkeys(point["comparability"]["id"] for point in report["points"] if point["comparability"])
    return [row for key in keys for row in _rows(history, key)]


def _rows(history: History, key: str) -> list[dict[str, Any]]:
    trend = find_trend(history.series(key, DEFAULT_METRIC, LAST))
    said = [text for text, effect in story(trend) if effect is not None]
    words = {change.run.run_id: text for change, text in zip(trend.changes, said, strict=False)}
    runs = history.runs(comparability_id=key, verdict=SUCCESS, last=LAST)
    return [_row(run, words.get(run.run_id, "")) for run in runs]


def _row(run: StoredRun, words: str) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "point": run.point,
        "comparability_id": run.comparability_id,
        "ended_at": run.ended_at,
        "commit": run.commit,
        "values": {name: values[0] for name, values in run.values.items() if len(values) == 1},
        "is_change": bool(words),
        "words": words,
    }
