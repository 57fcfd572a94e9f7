"""The one reader of report.json, for gates, histories, exports, comparisons of nodes, and the page."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.errors import BadInput, Damaged, MBridgeError
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import MEASURES, measure
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report.model import SCHEMA_VERSION, PointReport, RunReport, report_digest
from cloudai_mbridge.runner.journal import read_entries
from cloudai_mbridge.runner.journal_file import UNTRIED
from cloudai_mbridge.runner.lock import no_driver

_OLDEST = 2  # its statistics lack the capped mean; later versions of mbridge added other parts without a new version
_IN_A_REPORT = ("scenario", "system", "created_at", "points")
_IN_A_POINT = (
    *("key", "test_id", "label", "iteration", "verdict", "reasons", "num_steps", "job", "attempts", "comparability"),
    *("environment", "metrics", "steps"),
)


def read_report(path: Path) -> tuple[RunReport, Path]:
    """Return a report.json, or the report in a run's directory, and the file's path.

    BadInput: the file is missing, not a report, or of another schema version; as `find_report`; the run in
    the directory has been continued since.
    Damaged: the report's digest does not match its content. Reports of earlier releases have no digest.
    """
    file = find_report(path)
    try:
        data = parse_json(read_regular(file))
        is_edited = isinstance(data, dict) and "digest" in data and data["digest"] != report_digest(data)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}); give a report.json or a run's directory") from None
    except (ValueError, RecursionError) as error:
        if file.name == ROOT_FILES.report:  # cut off, as by a full disk
            raise Damaged(
                f"{file}: is damaged: it is not JSON ({error}); write it again with"
                " `mbridge generate-report --result-dir RUN`"
            ) from None
        raise BadInput(f"{file}: is not JSON ({error}); give a report.json that mbridge wrote") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise BadInput(
            f"{file}: schema_version is {version}, and this mbridge reads up to {SCHEMA_VERSION}; use the mbridge that"
            " wrote it, or a later one"
        )
    if type(version) is not int or version < _OLDEST:
        raise BadInput(
            f"{file}: schema_version is {version!r}, {SCHEMA_VERSION} is needed; write it again with"
            " `mbridge generate-report --result-dir DIR`"
        )
    if is_edited:
        raise Damaged(
            f"{file}: was edited: its digest does not match its content; write it again with"
            " `mbridge generate-report --result-dir RUN`"
        )
    try:
        report = report_of(data)
    except ValueError as error:
        raise BadInput(f"{file}: {error}; the file is not a report that mbridge wrote") from None
    if path.is_dir():
        _refuse_outdated(report, path)
    return report, file


def _refuse_outdated(report: RunReport, root: Path) -> None:
    """Raise BadInput of a report that lacks a job of its run. Without a readable journal, the report counts."""
    known = {point.key: len(point.attempts) for point in report.points}
    try:
        entries = read_entries(root)
    except (MBridgeError, OSError):
        return
    for key, entry in entries.items():
        if entry.last is not None and entry.last.number > known.get(key, 0) and entry.verdict != UNTRIED:
            raise BadInput(
                f"{root}: {ROOT_FILES.report} is out of date: attempt {entry.last.number} of {key} is newer; continue"
                f" with `mbridge resume {root}`, or write it again with `mbridge generate-report --result-dir {root}`"
            )


def report_of(data: Mapping[str, Any]) -> RunReport:
    """Return the report from its published form.

    Parts that earlier reports lack are empty. ValueError: a part is missing or invalid; its message begins with the
    part, such as points.0.steps.
    """
    if lacking := next(_lacking(data), None):
        raise ValueError(f"{lacking}: is missing")
    tool = data.get("tool")
    version = str(tool.get("version", "")) if isinstance(tool, Mapping) else ""
    is_old = data.get("schema_version") == _OLDEST
    points = list(map(_prefilled, data["points"])) if is_old and isinstance(data["points"], list) else data["points"]
    try:
        report = _adapter().validate_python({**data, "points": points, "tool_version": version})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{visible('.'.join(map(str, first['loc'])))}: {first['msg']}") from None
    for number, point in enumerate(report.points):
        if mistake := _find_mistake(point):
            raise ValueError(f"points.{number}.{mistake}")
    return replace(report, points=tuple(map(_with_capped, report.points))) if is_old else report


@cache
def _adapter() -> TypeAdapter[RunReport]:
    return TypeAdapter(RunReport)


def _lacking(data: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _IN_A_REPORT if name not in data)
    points = data["points"] if isinstance(data["points"], list) else ()
    for number, point in enumerate(points):
        if isinstance(point, Mapping):
            yield from (f"points.{number}.{name}" for name in _IN_A_POINT if name not in point)


def _find_mistake(point: PointReport) -> str:
    """Return the first invalid part whose type is open, "" without one."""
    if (key := point.comparability) is not None:
        if not isinstance(key.get("id"), str):
            return "comparability.id: is not a text"
        if not isinstance(key.get("fields"), Mapping):
            return "comparability.fields: is not a table"
    nodes = point.environment.get("nodes")
    if nodes is not None and not (isinstance(nodes, list) and all(isinstance(node, str) for node in nodes)):
        return "environment.nodes: is not a list of texts"
    numbers = [("world_size", point.world_size)]
    numbers += [(f"attempts.{name}", each.get(name)) for each in point.attempts for name in ("gpus", "run_time_s")]
    for name, value in numbers:  # they are parts of sums
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and abs(value) < 1e15):
            return f"{name}: is not a number below 1e15"
    return ""


def _prefilled(point: Any) -> Any:
    """Return a point of version 2, whose statistics lack the capped mean, with the plain mean in its place."""
    metrics = point.get("metrics") if isinstance(point, Mapping) else None
    if not isinstance(metrics, Mapping):
        return point
    old = {each.name: metrics.get(each.name) for each in MEASURES if each.is_statistic}
    new = {
        name: {"capped_mean": value.get("mean"), "capped_std": value.get("std"), **value}
        for name, value in old.items()
        if isinstance(value, Mapping)
    }
    return {**point, "metrics": {**metrics, **new}}


def _with_capped(point: PointReport) -> PointReport:
    """Return a point of version 2 with the capped means of its steps, where these have all values."""
    if (known := point.metrics) is None:
        return point
    again = measure(point.steps, known.warmup_steps, known.tokens_per_step_per_gpu, num_steps=point.num_steps)
    new = {
        each.name: replace(old, capped_mean=found.capped_mean, capped_std=found.capped_std)
        for each in MEASURES
        if each.is_statistic and (old := getattr(known, each.name)) and (found := getattr(again, each.name))
    }
    return replace(point, metrics=replace(known, **new))


def find_report(path: Path) -> Path:
    """Return the report in a run's directory; any other path is returned unchanged.

    InUse: another process has locked the run: its report is not written yet, or out of date.
    NothingRan: a dry run, or a run that submitted nothing.
    BadInput: no report.
    """
    if not path.is_dir():
        return path
    with no_driver(path):
        if (file := path / ROOT_FILES.report).is_file():
            return file
    refuse_dry_run(path, read_plan_data(path))
    raise BadInput(
        f"{path}: has no {ROOT_FILES.report}: its runs have not ended; continue with `mbridge resume {path}`, or, if"
        f" their jobs have ended, write it with `mbridge generate-report --result-dir {path}`"
    )
