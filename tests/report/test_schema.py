"""The published schema takes every report that is written, and nothing that has lost, gained or renamed a field."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.runs import read_results
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import MEASURES, Metrics, Statistic, measure
from cloudai_mbridge.report import build_report, write_report
from cloudai_mbridge.report.html import render_report_file
from cloudai_mbridge.report.model import SCHEMA_VERSION, PointReport, RehearsalReport, RunReport
from cloudai_mbridge.report.read import report_of
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.conftest import REPOSITORY
from tests.golden import GoldenFile
from tests.report.conftest import VIOLATION, ARun, a_log, as_json, some_point, some_rejected, some_report

pytestmark = pytest.mark.process

SCHEMA_FILE = REPOSITORY / "cloudai_mbridge" / "report" / "report.schema.json"
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
# Of the first reports of this version; measures that came later are not required
FIRST_METRICS = {
    *("warmup_steps", "window", "step_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "first_loss", "last_loss"),
    *("peak_memory_gib", "memory_kind", "flops_formula", "flops_per_step", "tokens_per_step_per_gpu"),
}
LATER = {"digest", "gpus", "left_out", "last_lines", "rehearsed"} | (
    {field.name for field in dataclasses.fields(Metrics)} - FIRST_METRICS
)
CHECK = jsonschema.Draft202012Validator(SCHEMA)
ENVIRONMENT = {
    **{"hostname": "n1", "platform": "Linux", "python": "3.11.7", "torch": "2.9", "megatron_core": "0.16.1"},
    **{"cuda": "12.9", "nccl": "2.27.5", "driver": "580.82", "device": "NVIDIA H100", "transformer_engine": "2.7"},
    **{"git": {"commit": "c0ffee", "dirty": False}, "packages": {"torch": "2.9"}},
}


def _errors(report: Any) -> list[str]:
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in CHECK.iter_errors(report)]


@pytest.fixture
def report(embedded: ARun) -> dict[str, Any]:
    """A run that is good, one that has failed, a rejected point."""
    embedded.ended("t/mb1/0", a_log(6, {"environment": ENVIRONMENT}))
    embedded.ended("t/mb2/0", a_log(3), JobStatus("OUT_OF_MEMORY", JobClass.FAILED, signal=9, nodes="n1"))
    return as_json(build_report(embedded.root))


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert SCHEMA["$id"] == f"urn:cloudai-mbridge:report:{SCHEMA_VERSION}"


def test_it_takes_a_real_report(report: dict[str, Any]) -> None:
    assert [point["verdict"] for point in report["points"]] == ["success", "failed", "rejected"]
    assert report["points"][0]["environment"]["driver"] == "580.82"
    assert report["points"][1]["failure"]["id"]
    assert _errors(report) == []


def test_it_takes_a_run_that_was_never_submitted(embedded: ARun) -> None:
    assert _errors(as_json(build_report(embedded.root))) == []


def test_it_takes_numbers_that_are_none(embedded: ARun) -> None:
    log = a_log(6, losses={"lm loss": math.nan}, grad_norm=math.inf, tflops_per_gpu=None, peak_memory_gib=None)
    embedded.ended("t/mb1/0", log)
    embedded.ended("t/mb2/0", "nothing\n")
    data = as_json(build_report(embedded.root))
    assert (data["points"][0]["steps"][0]["loss"], data["points"][0]["steps"][0]["grad_norm"]) == ("nan", "inf")
    assert _errors(data) == []


def test_it_takes_a_log_from_before_memory_was_measured(embedded: ARun) -> None:
    lines = [line for line in a_log(6).splitlines() if "MBRIDGE_STEP" in line]
    old = [json.loads(line.partition(" ")[2]) for line in lines]
    for record in old:
        del record["peak_memory_gib"]
    embedded.ended("t/mb1/0", "".join(f"MBRIDGE_STEP {json.dumps(record)}\n" for record in old))
    data = as_json(build_report(embedded.root))
    point = data["points"][0]
    assert (point["verdict"], point["metrics"]["peak_memory_gib"], point["metrics"]["memory_kind"]) == (
        "success",
        None,
        None,
    )
    assert _errors(data) == []


def test_it_takes_the_upstream_launchers_report(upstream: ARun) -> None:
    data = as_json(build_report(upstream.root))
    assert data["points"][0]["verdict"] == "success"
    assert _errors(data) == []


def test_it_takes_what_a_log_says_falsely(embedded: ARun) -> None:
    """The record is text of a log: whatever types it has, the report keeps to the contract."""
    lies = {
        "environment": {"packages": ["x"], "git": {"commit": 3}, "driver": {}, "hostname": 7, "device": ""},
        "flops_per_step": "many",
        "flops_formula": ["x"],
        "memory_kind": "other",
    }
    for wrong in (lies, {"environment": 5, "flops_per_step": True, "device": ["x"], "dtype": {"a": [1]}}):
        (embedded.root / "t/mb1/0/stdout.txt").write_text(a_log(6, wrong))
        assert _errors(as_json(build_report(embedded.root))) == []


def test_it_takes_a_step_number_that_no_run_reaches(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6) + a_log(1, step=10**30) + a_log(1, step=True))
    path = write_report(build_report(embedded.root), embedded.root)
    assert _errors(json.loads(path.read_text())) == []


def test_the_gate_reads_what_is_written(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6, {"environment": ENVIRONMENT}))
    report = build_report(embedded.root)
    write_report(report, embedded.root)
    good, failed = read_results(embedded.root)
    assert (good.point, good.is_success, good.nodes) == ("t/mb1", True, ("n1", "n2"))
    assert good.comparability_id == (report.points[0].comparability or {})["id"]
    assert (good.flops_formula, good.flops_per_step) == ("megatron-bridge/new", 2e9)
    assert good.tokens_per_step_per_gpu == 8 * 64 / 2
    assert [step.peak_memory_gib for step in good.counted_steps] == [1.375, 1.5, 1.625, 1.75]
    assert not failed.is_success


def _objects(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all fields below closed objects."""
    if isinstance(data, list):
        return [found for i, item in enumerate(data) for found in _objects(item, (*path, i))]
    if not isinstance(data, dict):
        return []
    return [each for name, item in data.items() for each in ((*path, name), *_objects(item, (*path, name)))]


# Where names are data: a rule, a package, an argument may be there or not
OPEN = {"rule_counts", "packages", "variables", "args", "run", "coordinates", "operands", "excluded_nodes"}
# What a job has only once its scheduler was asked, and a violation only where a release decides an operand
OPTIONAL = {"job_class", "exit_code", "signal", "run_time_s", "restarts", "origins"}
OPTIONAL |= {"benchmark", "variables", *LATER}


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def test_a_field_that_is_gone_or_renamed_is_refused(report: dict[str, Any]) -> None:
    report["points"][0]["steps"] = report["points"][0]["steps"][:1]
    report["points"][1]["steps"] = []
    paths = [
        path
        for path in _objects(report)
        if isinstance(path[-1], str) and not OPEN & set(map(str, path[:-1])) and "." not in path[-1]
    ]
    assert len(paths) > 150
    for path in paths:
        renamed = copy.deepcopy(report)
        parent = _at(renamed, path[:-1])
        parent[f"{path[-1]}_x"] = parent.pop(path[-1])
        assert _errors(renamed), path
        gone = copy.deepcopy(report)
        del _at(gone, path[:-1])[path[-1]]
        assert _errors(gone) or path[-1] in OPTIONAL, path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("points", 0, "verdict"), "passed"),
        (("points", 0, "metrics", "step_time_s", "n"), 0),
        (("points", 0, "metrics", "window"), [3]),
        (("points", 0, "metrics", "peak_memory_gib"), "nan"),
        (("points", 0, "metrics"), None),
        (("points", 0, "steps", 0, "loss"), "NaN"),
        (("points", 0, "comparability", "id"), "0"),
        (("points", 0, "comparability", "fields", "elsewhere"), 1),
        (("points", 0, "environment", "nodes"), "n[1-2]"),
        (("points", 2, "metrics"), {}),
        (("points", 2, "violations"), []),
        (("schema_version",), 1),
    ],
)
def test_a_value_of_another_kind_is_refused(report: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    _at(report, path[:-1])[path[-1]] = value
    assert _errors(report)


def test_the_schema_has_every_measure(golden_file: GoldenFile) -> None:
    """`make golden` adds those that are missing."""
    known = SCHEMA["$defs"]["metrics"]["properties"]
    missing = [measure for measure in MEASURES if measure.name not in known]
    form = '        "{}": {{"$ref": "#/$defs/{}_or_null", "description": "{}."}},\n'
    lines = [form.format(m.name, "statistic" if m.is_statistic else "number", m.about) for m in missing]
    mark = '        "memory_kind": {"enum"'
    golden_file(SCHEMA_FILE, SCHEMA_FILE.read_text().replace(mark, "".join(lines) + mark))
    statistics = {name for name, form in known.items() if form.get("$ref") == "#/$defs/statistic_or_null"}
    assert statistics == {measure.name for measure in MEASURES if measure.is_statistic}


@pytest.mark.parametrize(
    ("kind", "where", "renamed"),
    [
        (RunReport, SCHEMA, {"tool_version"}),
        (PointReport, SCHEMA["$defs"]["point"], set()),
        (Metrics, SCHEMA["$defs"]["metrics"], set()),
        (Statistic, SCHEMA["$defs"]["statistic"], set()),
        (StepRecord, SCHEMA["$defs"]["step"], set()),
        (RehearsalReport, SCHEMA["properties"]["rehearsed"]["items"], set()),
    ],
)
def test_the_schema_and_the_values_name_the_same_fields(kind: Any, where: Any, renamed: set[str]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)} - renamed
    added = {"schema_version", "tool", "summary", "digest"} if kind is RunReport else set()
    assert set(where["properties"]) == fields | added
    later = LATER if kind in (RunReport, PointReport, Metrics, StepRecord) else set()
    assert set(where["required"]) == (fields | added) - later


def test_a_report_without_a_later_metric_is_read(report: dict[str, Any], tmp_path: Path) -> None:
    del report["points"][0]["metrics"]["first_loss"], report["digest"]
    metrics = report_of(report).points[0].metrics
    assert metrics is not None
    assert (metrics.first_loss, metrics.last_loss is None) == (None, False)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert render_report_file(path).startswith("<!")


def test_what_a_report_lacks_is_one_line(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    del report["points"][0]["metrics"]["window"], report["digest"]
    report["points"][0]["metrics"]["warmup_steps"] = "two"
    path.write_text(json.dumps(report))
    with pytest.raises(BadInput) as error:
        render_report_file(path)
    assert "pydantic" not in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert "points.0.metrics.warmup_steps: Input should be a valid integer" in str(error.value)


def test_values_alone_make_a_report_that_it_takes() -> None:
    """What the tests of the other formats use is a report, too."""
    machine = {"python": "3", "platform": "Linux", "hostname": "h", "git": None, "packages": {}}
    nothing = {"device": None, "driver": None, "cuda": None, "nccl": None, "python": None, "packages": {}, "git": None}
    nowhere = {**nothing, "nodes": [], "image": None, "repositories": []}
    points = (
        some_point(environment=nowhere),
        some_rejected(),
        some_point(environment=nowhere, metrics=measure((), 1, None)),
    )
    assert _errors(as_json(some_report(*points, environment=machine))) == []


def test_it_takes_a_point_that_does_not_fit_into_memory() -> None:
    rejected = some_rejected(violations=({**VIOLATION, "rule_id": "MEMORY"},))
    machine = {"python": "3", "platform": "Linux", "hostname": "h", "git": None, "packages": {}}
    assert _errors(as_json(some_report(rejected, environment=machine))) == []


def test_lone_surrogates_are_spelt_out(embedded: ARun) -> None:
    said = {"device": "H100\ud800", "environment": {"hostname": "n\udfff", "packages": {"to\ud800rch": "2"}}}
    embedded.ended("t/mb1/0", a_log(6, said))
    data = build_report(embedded.root).to_dict()
    assert "\\ud800" in data["points"][0]["environment"]["device"]
    json.dumps(data, ensure_ascii=False).encode()
    assert _errors(as_json(build_report(embedded.root))) == []


def test_it_takes_cancelled_runs(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6))
    journal = Journal(embedded.root / "journal.sqlite")
    journal.stopped()
    journal.close()
    data = as_json(build_report(embedded.root))
    assert [point["verdict"] for point in data["points"]] == ["success", "cancelled", "rejected"]
    assert data["points"][1]["reasons"] == ["not submitted: mbridge was stopped"]
    assert data["summary"]["cancelled"] == 1
    assert _errors(data) == []
