"""A damaged report.json is refused in one line that names file and part, or read; no reader ends in a traceback."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, MBridgeError
from cloudai_mbridge.export.table import read_table
from cloudai_mbridge.export.targets import csv
from cloudai_mbridge.gate.runs import group_by_point, read_results
from cloudai_mbridge.report.html import render_report_file
from cloudai_mbridge.report.model import SCHEMA_VERSION
from cloudai_mbridge.report.read import read_report
from cloudai_mbridge.verdict import Verdict
from tests.golden import Sentence
from tests.report.conftest import as_json, some_point, some_rejected, some_report

GONE = object()
WRONG = (GONE, None, "\x1b[2Jx", -1, 10**400, True, [3], {"a": 1}, "nan")
JOB = {
    "number": 1,
    "gpus": 4,
    "job_id": "7",
    "run_time_s": 4.0,
    "started_at": "2026-01-01T00:00:00+00:00",
    "nodes": "n1",
}
KEY = {"id": "0" * 16, "fields": {"recipe": "gpt"}}


@pytest.fixture
def report() -> dict[str, Any]:
    ran: dict[str, Any] = {"job": JOB, "attempts": (JOB,), "comparability": KEY, "environment": {"nodes": ["n1"]}}
    failure = {"id": "oom", "kind": "application", "title": "t", "remedy": "r", "evidence": [], "nodes": []}
    failed = some_point(Verdict.FAILED, "tp2", 1, failure=failure, reasons=("r",), evidence=("e",), **ran)
    data = as_json(some_report(some_point(num_steps=3, **ran), failed, some_rejected()))
    del data["digest"]
    return data


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data[:1] if len(path) > 1 else data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*path, key))


def _damaged(report: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(report)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    if value is GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return data


def _refusal(read: Callable[[Path], object], file: Path) -> str:
    """Return the message of a refusal, "" if the file was read; anything else than a refusal is raised."""
    try:
        read(file)
    except MBridgeError as error:
        return str(error)
    return ""


def _read_by_all(file: Path) -> None:
    group_by_point(read_results(file))
    for by_point in (False, True):
        csv.render(read_table(file, by_point=by_point))


def test_every_damage_is_named_or_harmless(report: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    paths = list(_paths(report))
    refusals = 0
    for path, value in itertools.product(paths, WRONG):
        file.write_text(json.dumps(_damaged(report, path, value)))
        refusal = _refusal(read_report, file)
        if refusal:
            refusals += 1
            assert refusal.startswith(f"{file}: "), path
            assert refusal.isprintable(), path
            assert str(path[0]) in refusal, path
        else:
            _read_by_all(file)
            page = _refusal(render_report_file, file)
            assert not page or page.startswith(f"{file}: "), path
    assert len(paths) > 100
    assert refusals > 300


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 1, "3"], ids=["SCHEMA VERSION 1", "1", "3"])
def test_another_version_is_refused(report: dict[str, Any], tmp_path: Path, sentence: Sentence, version: Any) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**report, "schema_version": version}))
    with pytest.raises(BadInput) as caught:
        read_report(tmp_path / "report.json")
    sentence(caught)


def test_version_2_has_the_capped_means_of_its_steps(report: dict[str, Any], tmp_path: Path) -> None:
    now = read_report(_written(tmp_path, report))[0]
    for point in report["points"]:
        for statistic in (value for value in (point["metrics"] or {}).values() if isinstance(value, dict)):
            del statistic["capped_mean"], statistic["capped_std"]
    then = read_report(_written(tmp_path, {**report, "schema_version": 2}))[0]
    assert then == now


def _written(directory: Path, report: dict[str, Any]) -> Path:
    (directory / "report.json").write_text(json.dumps(report))
    return directory / "report.json"
