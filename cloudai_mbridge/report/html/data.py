"""The page's data of a report, compact: steps as columns of rounded numbers, equal values stored once."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import TABLE_MEASURES, Statistic
from cloudai_mbridge.report.model import plain
from cloudai_mbridge.report.read import report_of
from cloudai_mbridge.report.text import ending

DIGITS = 7
MOST_VALUES, MOST_RUNS = 12, 4  # of a field that differs between runs
_STATISTIC = tuple(field.name for field in dataclasses.fields(Statistic))
_HEAD = (
    *("tool", "scenario", "system", "created_at", "summary", "num_rejected", "rule_counts", "notes"),
    *("excluded_nodes", "environment", "searches"),
)
_AS_THEY_ARE = (
    *("key", "test_id", "test_name", "label", "iteration", "coordinates", "verdict", "reasons", "num_nodes"),
    *("world_size", "num_steps", "is_pre_test", "predicted"),
)
_VIOLATION = ("rule_id", "where", "fact", "remedy", "message")
_JOB = ("number", "job_id", "state", "exit_code", "reason", "failure", "nodes", "submitted_at", "ended_at")


Logs = Mapping[str, Sequence[Mapping[str, str]]]


def page_data(
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    gate: Mapping[str, Any] | None,
    nodes: Mapping[str, Any] | None = None,
    logs: Logs = MappingProxyType({}),
) -> dict[str, Any]:
    """Return plain data for the page's JSON. logs: links to the logs of a run, by its key."""
    points = report["points"]
    ran = [(index, point) for index, point in enumerate(points) if point["verdict"] != "rejected"]
    data: dict[str, Any] = compact(
        {
            "head": {name: report.get(name) for name in _HEAD},
            "ending": ending(report_of({**report, "points": [_without_most_steps(point) for point in points]})),
            "axes": axes(points),
            "statistic": _STATISTIC,
            "measures": [
                {
                    **{"id": measure.name, "label": measure.label, "unit": measure.unit},
                    **{"title": measure.short_heading, "better": str(measure.direction)},
                }
                for measure in TABLE_MEASURES
            ],
            "runs": [{**_run(point), "logs": logs.get(point["key"], ())} for point in points],
            "differences": {
                "environment": differences((index, point.get("environment") or {}) for index, point in ran),
                "configuration": differences((index, point.get("args") or {}) for index, point in ran),
                "comparability": differences(
                    (index, (point.get("comparability") or {}).get("fields", {})) for index, point in ran
                ),
            },
            "history": history,
            "gate": gate,
            "nodes": nodes,
        }
    )
    return data


def _without_most_steps(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point as required by its ranking: a report may have a million steps."""
    return {**point, "steps": (point.get("steps") or ())[:1]}


def axes(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all coordinates, in the order of their first use."""
    return list(dict.fromkeys(name for point in points for name in point["coordinates"]))


def compact(value: Any) -> Any:
    """Return plain data with floats at seven significant digits, and invisible characters of texts escaped."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else plain(value)
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [compact(item) for item in value]
    return value


def _run(point: Mapping[str, Any]) -> dict[str, Any]:
    metrics, job, log, environment = (point.get(name) or {} for name in ("metrics", "job", "log", "environment"))
    violations = point["violations"] if point["verdict"] == "rejected" else ()
    attempts = point.get("attempts") or ()
    statistics = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
    return {
        **{name: point.get(name) for name in _AS_THEY_ARE},
        "violations": [{name: str(violation.get(name, "")) for name in _VIOLATION} for violation in violations],
        "evidence": list(point.get("evidence") or ()),
        "failure": point.get("failure"),
        "job": _some(job, _JOB),
        "attempts": [_some(attempt, _JOB) for attempt in attempts] if len(attempts) > 1 else [],
        "log": _some(log, ("file", "notes")),
        "nodes": environment.get("nodes") or ([job["nodes"]] if job.get("nodes") else []),
        "comparability": (point.get("comparability") or {}).get("id"),
        "statistics": {name: [values.get(field) for field in _STATISTIC] for name, values in statistics.items()},
        "warmup_steps": metrics.get("warmup_steps", 0),
        "window": metrics.get("window"),
        "losses": [metrics.get("first_loss"), metrics.get("last_loss")],
        **{measure.name: metrics.get(measure.name) for measure in TABLE_MEASURES if not measure.is_statistic},
        "memory_kind": metrics.get("memory_kind"),
        "flops_formula": metrics.get("flops_formula"),
        "steps": _steps(point.get("steps") or ()),
    }


def _some(mapping: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: mapping[name] for name in names if mapping.get(name) not in (None, "", [], ())}


def _steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return columns: times, losses, and the steps' numbers, or only the first if they are consecutive."""
    numbers = [step["step"] for step in steps]
    counts_up = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return {
        "first": numbers[0] if counts_up else None,
        "numbers": [] if counts_up else numbers,
        "times": [step.get("step_time_s") for step in steps],
        "losses": [step.get("loss") for step in steps],
    }


def differences(runs: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Split the fields of the runs, given with their indices, into common and differing fields.

    Returns "common": {name: text}, and "differing": {name: {"num_values": n, "values": [...]}} with at most MOST_VALUES
    values, the most frequent first, each {"text", "count", "runs": the first few indices}. The text is null if a run
    lacks the field.
    """
    flat = [(index, dict(flatten(fields))) for index, fields in runs]
    names = dict.fromkeys(name for _, fields in flat for name in fields)
    common, differing = {}, {}
    for name in names:
        owners: dict[str | None, list[int]] = defaultdict(list)
        for index, fields in flat:
            owners[fields.get(name)].append(index)
        if len(owners) == 1:
            common[name] = next(iter(owners))
            continue
        most_frequent = sorted(owners.items(), key=lambda item: -len(item[1]))[:MOST_VALUES]
        values = [{"text": text, "count": len(runs), "runs": runs[:MOST_RUNS]} for text, runs in most_frequent]
        differing[name] = {"num_values": len(owners), "values": values}
    return {"common": common, "differing": differing}


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield dotted names and texts; lists of scalars become one text, lists of tables are numbered."""
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from flatten({str(number): item for number, item in enumerate(value, 1)}, f"{name}.")
        else:
            yield name, _text(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return json.dumps(value)
