"""junit.xml, read by the standard library's parser, against the rules of the common schemas."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.junit import render_junit
from cloudai_mbridge.report.model import RunReport
from cloudai_mbridge.verdict import Verdict
from tests.golden import Sentence
from tests.report.conftest import NASTY, VIOLATION, some_point, some_rejected, some_report

TIMES = {"started_at": "2026-01-02T03:04:05.250+00:00", "ended_at": "2026-01-02T03:05:05.750+00:00"}
RESULTS = {"failure", "error", "skipped"}


def _parsed(report: RunReport) -> ET.Element:
    root = ET.fromstring(render_junit(report).encode())
    _check(root)
    return root


def _check(root: ET.Element) -> None:
    """Assert what the schemas of Ant's, Jenkins' and pytest's readers have in common."""
    assert root.tag == "testsuites"
    for suite in (root, *root):
        cases = list(suite.iter("testcase"))
        assert suite.get("name") is not None
        assert int(suite.attrib["tests"]) == len(cases)
        for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == sum(case.find(tag) is not None for case in cases)
        assert float(suite.attrib["time"]) == pytest.approx(sum(float(case.get("time", 0)) for case in cases), abs=0.01)
    for suite in root:
        assert suite.tag == "testsuite"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
        assert {child.tag for child in suite} <= {"testcase"}
        for case in suite:
            assert {"name", "classname"} <= set(case.attrib)
            tags = [child.tag for child in case]
            assert len(RESULTS & set(tags)) == len([tag for tag in tags if tag in RESULTS]) <= 1
            assert set(tags) <= RESULTS | {"properties"}
            assert tags in ([], tags[:1], ["properties", *tags[1:]])
            for each in case.iter("property"):
                assert set(each.attrib) == {"name", "value"}


def _case(root: ET.Element, name: str) -> ET.Element:
    return next(case for case in root.iter("testcase") if case.get("name") == name)


def test_every_verdict(sentence: Sentence) -> None:
    failed = some_point(
        Verdict.FAILED,
        "tp2",
        job={"started_at": None, "ended_at": None, "run_time_s": 2.5},
        reasons=("the job ended as FAILED", "3 of 4 steps are in the log"),
        evidence=("stderr.txt:1: killed", "b"),
        failure={"id": "oom", "kind": "application", "title": "Out of memory", "remedy": "smaller mb"},
    )
    report = some_report(
        *(some_point(job=TIMES, comparability={"id": "0123456789abcdef", "fields": {}}), failed),
        *(some_point(Verdict.SKIPPED, "tp4", reasons=("a/b/0 failed",), job={}), some_rejected()),
        environment={"hostname": "login"},
    )
    root = _parsed(report)
    assert root.attrib == {
        **{"name": "s", "tests": "5", "failures": "1", "errors": "1", "skipped": "2", "time": "63.000"}
    }
    (suite,) = root
    assert (suite.get("name"), suite.get("hostname"), suite.get("timestamp")) == (
        "sweep",
        "login",
        report.created_at[:19],
    )
    good = _case(root, "tp1/0")
    assert (good.get("classname"), good.get("time")) == ("s.sweep", "60.500")
    properties = {each.attrib["name"]: each.attrib["value"] for each in good.iter("property")}
    assert properties["comparability"] == "0123456789abcdef"
    assert (properties["step_time_s.mean"], properties["step_time_s.n"], properties["window"]) == ("3.5", "2", "3-4")
    assert (properties["peak_memory_gib"], properties["memory_kind"]) == ("1.5", "resident set")
    failure = _case(root, "tp2/0").find("failure")
    assert failure is not None
    assert failure.attrib == {"message": "the job ended as FAILED; 3 of 4 steps are in the log", "type": "oom"}
    sentence(failure.text)
    assert _case(root, "tp2/0").get("time") == "2.500"
    skipped, rejected = _case(root, "tp4/0"), _case(root, "tp9").find("skipped")
    assert skipped.get("time") is None
    assert rejected is not None
    assert rejected.get("message") == VIOLATION["message"]


def test_a_suite_per_test_and_no_property_for_a_missing_metric() -> None:
    root = _parsed(some_report(some_point(), some_point(test_id="other"), some_point(iteration=1)))
    assert [(suite.get("name"), suite.get("tests")) for suite in root] == [("sweep", "2"), ("other", "1")]
    root = _parsed(some_report(some_point(Verdict.FAILED, steps=(), metrics=measure((), 2, None))))
    assert {each.attrib["name"] for each in root.iter("property")} == {"warmup_steps"}


@pytest.mark.parametrize(
    ("points", "tests"), [((some_rejected(),), ("sweep",)), ((), ("sweep",)), ((some_rejected(),), ())]
)
def test_a_test_of_which_nothing_ran_does_not_pass(points: Any, tests: tuple[str, ...]) -> None:
    report = some_report(*points, tests=tests)
    assert not report.succeeded
    assert _parsed(report).get("errors") == "1"


def test_a_test_of_which_a_part_was_not_submitted_does_not_pass() -> None:
    """A budget that is spent fails no run, and the scenario all the same."""
    root = _parsed(some_report(some_point(), some_point(Verdict.SKIPPED, "tp4", reasons=("max_gpu_hours is spent",))))
    error = _case(root, "(as requested)").find("error")
    assert error is not None
    assert error.get("message") == "1 of 2 runs were not submitted"


def test_a_node_that_fails_the_pre_test_fails_nothing() -> None:
    node = some_point(Verdict.FAILED, "n7", test_id="pre_test", is_pre_test=True, reasons=("gpu_lost",))
    report = some_report(some_point(), node, tests=("sweep",))
    assert report.succeeded
    root = _parsed(report)
    assert (root.get("failures"), root.get("skipped")) == ("0", "1")
    skipped = _case(root, "n7/0").find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "the node failed the pre-test and is excluded: gpu_lost"


@pytest.mark.parametrize("name", [*NASTY, "nul\x00 bell\x07 esc\x1b cr\r del\x7f", "\ud800\ufffe\uffff"])
def test_names_anywhere(name: str) -> None:
    failed = some_point(Verdict.FAILED, name, reasons=(name,), evidence=(name,), test_id=name)
    text = render_junit(some_report(failed, scenario=name))
    assert not re.search("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    root = _parsed(some_report(failed, scenario=name))
    shown = visible(name)
    failure = _case(root, f"{shown}/0").find("failure")
    assert failure is not None
    assert (root.get("name"), failure.get("message"), failure.text) == (shown, shown, f"{shown}\n{shown}")


def test_success_and_junit_agree() -> None:
    """A CI that looks at junit.xml only sees the same as one that looks at the exit code."""
    checks = (
        some_point(verdict, "n7", test_id="pre_test", is_pre_test=True)
        for verdict in Verdict
        if verdict not in ("rejected", "unfinished")
    )
    kinds = [some_point(), some_point(Verdict.FAILED), some_rejected(), some_point(test_id="b"), *checks]
    kinds += [some_point(Verdict.SKIPPED, "tp4")]
    for chosen in range(1 << len(kinds)):
        report = some_report(*(point for i, point in enumerate(kinds) if chosen >> i & 1), tests=("sweep",))
        root = _parsed(report)
        assert report.succeeded is (root.get("failures") == root.get("errors") == "0")


def test_cancelled_runs_are_skipped_and_an_error_says_that_they_are_missing() -> None:
    nothing: dict[str, Any] = {"steps": (), "metrics": measure((), 2, None), "reasons": ("mbridge was stopped",)}
    report = some_report(some_point(), some_point(Verdict.CANCELLED, "tp2", **nothing))
    root = _parsed(report)
    assert [case.find("skipped") is not None for case in root.iter("testcase")] == [False, True, False]
    (error,) = root.iter("error")
    assert error.get("message") == "1 of 2 runs were cancelled"
    assert not report.succeeded
