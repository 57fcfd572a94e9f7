"""The report as one self-contained HTML file: no network, no server, no fonts.

The report travels as JSON in a script element that the browser does not run, and is shown through text nodes only. The
content security policy names the digests of the scripts: no others run, whatever a report contains; nothing is fetched.
"""

import base64
import dataclasses
import hashlib
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import TABLE_MEASURES, Statistic
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import plain
from cloudai_mbridge.report.read import read_report, report_of
from cloudai_mbridge.report.text import ending

DIGITS = 7
MOST_VALUES, MOST_RUNS = 12, 4  # of a field that differs between runs
_STATISTIC = tuple(field.name for field in dataclasses.fields(Statistic))
_HEAD = (
    *("tool", "scenario", "system", "created_at", "summary", "num_rejected", "rule_counts", "notes"),
    *("excluded_nodes", "environment", "searches", "rehearsed"),
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
    ranked = [{**point, "steps": (point.get("steps") or ())[:1]} for point in points]  # of a million steps, maybe
    data: dict[str, Any] = compact(
        {
            "head": {name: report.get(name) for name in _HEAD},
            "ending": ending(report_of({**report, "points": ranked})),
            "axes": list(dict.fromkeys(name for point in points for name in point["coordinates"])),
            "statistic": _STATISTIC,
            "measures": [
                {
                    **{"id": measure.name, "label": measure.label, "unit": measure.unit},
                    **{"title": measure.short_heading, "better": str(measure.direction)},
                    **{"rate": measure.is_rate, "derived": bool(measure.work)},
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
    attempts, steps = point.get("attempts") or (), point.get("steps") or ()
    numbers = [step["step"] for step in steps]
    counts_up = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    statistics = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
    return {
        **{name: point.get(name) for name in _AS_THEY_ARE},
        "violations": [{name: str(violation.get(name, "")) for name in _VIOLATION} for violation in violations],
        "evidence": list(point.get("evidence") or ()),
        "last_lines": list(point.get("last_lines") or ()),
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
        "steps": {  # columns: the steps' numbers, or only the first if they are consecutive
            "first": numbers[0] if counts_up else None,
            "numbers": [] if counts_up else numbers,
            "times": [step.get("step_time_s") for step in steps],
            "losses": [step.get("loss") for step in steps],
            "left_out": [step["step"] for step in steps if step.get("left_out")],
        },
    }


def _some(mapping: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: mapping[name] for name in names if mapping.get(name) not in (None, "", [], ())}


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


_VENDOR = ("d3.min.js", "plot.umd.min.js")
_LICENCES = ("d3.LICENSE", "plot.LICENSE", "parts.LICENSE")
_STYLES = ("theme", "layout", "charts", "narrow", "print")
# In the order of their use: one scope, so that a module sees the modules before it
_MODULES = (
    *("dom", "format", "model", "statistics", "state", "figure", "columns", "filters", "table", "answer", "headline"),
    *("gate", "selection", "curves", "distribution", "sensitivity", "parallel", "pareto", "predicted", "searches"),
    *("nodes", "node_map", "failures", "rejected", "rehearsed", "history", "environment", "live", "main"),
)
# These may be escaped inside a JSON string, and do not occur outside of one
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def render_html(
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
    gate: Mapping[str, Any] | None = None,
    nodes: Mapping[str, Any] | None = None,
    *,
    logs: Logs = MappingProxyType({}),
    reload_s: int | None = None,
) -> str:
    """Render a report as a page of its own.

    report: `Report.to_dict()`. history: rows with run_id, point, comparability_id, ended_at, commit, values, is_change
    and words. gate: a GateResult as a dict; nodes: a NodesResult as a dict. logs: as of `log_links`. reload_s: after
    how many seconds the page loads itself again, None for a page that is final.
    """
    data = script_safe_json({**page_data(report, history, gate, nodes, logs), "reload_s": reload_s})
    page = _read("assets", "page.html")
    scripts = (*(_read("vendor", name) for name in _VENDOR), page_script())
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = " ".join(f"'sha256-{digest}'" for digest in digests)
    parts = {
        "{{policy}}": f"default-src 'none'; script-src {policy}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'",
        "{{style}}": "\n".join(_read("assets", "css", f"{name}.css") for name in _STYLES),
        "{{licences}}": script_safe_json("\n\n".join(_read("vendor", name) for name in _LICENCES)),
        "{{scripts}}": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    for mark, text in parts.items():
        page = page.replace(mark, text)
    before, after = page.split("{{data}}")  # last: text inside the data that looks like a mark is not replaced
    return f"{before}{data}{after}"


def log_links(report: Mapping[str, Any], root: Path, page: Path) -> dict[str, list[dict[str, str]]]:
    """Return the logs of every run that are there and not empty: key -> name and link, relative to a page's file."""
    start, links = os.path.relpath(root.resolve(), page.parent.resolve()), {}
    for point in report["points"]:
        log = (point.get("log") or {}).get("file") or ""
        names = dict.fromkeys((PurePosixPath(log).name, POINT_FILES.stderr)) if log else ()
        paths = {name: os.path.normpath(f"{start}/{point['key']}/{name}") for name in names}
        links[point["key"]] = [
            {"name": name, "href": f"./{quote(os.fsencode(path))}"}
            for name, path in paths.items()
            if _is_log(root / point["key"] / name)
        ]
    return links


def _is_log(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def render_report_file(
    path: Path, gate: Mapping[str, Any] | None = None, nodes: Mapping[str, Any] | None = None
) -> str:
    """Render the page of a report.json, or of the run in a directory, with the results of a gate or `mbridge nodes`.

    Raise as `read_report`, and BadInput if the report lacks a part that the page needs.
    """
    report, file = read_report(path)
    try:
        return render_html(report.to_dict(), gate=gate, nodes=nodes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{file}: lacks a part that the page shows ({type(error).__name__}: {error}); write it again"
            " with `mbridge generate-report --result-dir DIR`"
        ) from None


def page_script() -> str:
    """Return the page's own JavaScript: its files, joined in one scope."""
    modules = "\n".join(_read("assets", "js", f"{name}.js") for name in _MODULES)
    return f'(() => {{\n"use strict";\n{modules}\n}})();'


def script_safe_json(value: Any) -> str:
    """Return JSON in ASCII that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


@cache
def _read(*path: str) -> str:
    return resources.files(__package__).joinpath(*path).read_text(encoding="utf-8")
