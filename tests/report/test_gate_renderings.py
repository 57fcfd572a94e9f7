"""A gate's result on a terminal, as Markdown and as JUnit XML."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console

from cloudai_mbridge.gate.compare.verdict import EXIT_CODES, GateResult, GateVerdict, MetricVerdict, PointVerdict, worst
from cloudai_mbridge.report.formats.gate import render_gate, render_gate_junit, render_gate_markdown

HOSTILE = "<script>alert('1')</script>|`x`\"&\x1b[31m😀" + "p" * 300
SLOW = MetricVerdict("step_time_s", GateVerdict.REGRESSION, "+5.00 % (1 to 1.05)", "s", True, 1.0, 1.05, 0.05)
FINE = MetricVerdict("loss_curve", GateVerdict.PASS, "within", "", True, 6.0, 6.0, 0.0)
DOUBT = MetricVerdict("step_time_mean_s", GateVerdict.INCONCLUSIVE, "cannot be ruled out", "s", False)


def result(*metrics: MetricVerdict, point: str = "t/p", words: tuple[str, ...] = ()) -> GateResult:
    verdict = worst([m.verdict for m in metrics if m.decides and not m.waived] or [GateVerdict.PASS])
    points = (PointVerdict(point, verdict, words, metrics),)
    changes = {"packages.torch": ("2.12.0", "2.13.0")}
    return GateResult("default", "baseline b.toml", verdict, points, 0.01, ("a note",), changes)


def text_of(gate: GateResult) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_gate(gate))
    console.file.close()
    return console.export_text()


def test_all_three_say_verdict_numbers_and_changes() -> None:
    gate = result(SLOW, FINE)
    text, markdown = text_of(gate), render_gate_markdown(gate)
    for words in ("regression", "REGRESSION", "2.12.0 → 2.13.0", "a note", "+5.00%"):
        assert words in text
        assert words in markdown
    assert markdown.startswith("# ❌ Gate default: regression\n")


def test_junit_fails_for_what_is_not_green_and_decides() -> None:
    suites = ET.fromstring(render_gate_junit(result(SLOW, FINE, DOUBT)))
    results = {case.get("name"): [child.tag for child in case] for case in suites.iter("testcase")}
    assert results == {
        "(the point)": ["failure"],
        "step_time_s": ["failure"],
        "loss_curve": ["system-out"],
        "step_time_mean_s": ["skipped"],
    }
    counts = {name: suites.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "2", "errors": "0", "skipped": "1"}
    assert all(suites.get(name) == suites.find("testsuite").get(name) for name in counts)


def test_a_waived_regression_is_shown_and_fails_nothing() -> None:
    gate = result(replace(SLOW, waived="waived until 2026-12-31 by anna: known"), FINE)
    assert "regression (waived)" in text_of(gate)
    assert "waived until 2026-12-31" in render_gate_markdown(gate)
    assert ET.fromstring(render_gate_junit(gate)).get("failures") == "0"


def test_a_gate_without_points_is_an_error() -> None:
    gate = GateResult("p", "b", worst([]), (), 0.01)
    assert ET.fromstring(render_gate_junit(gate)).get("errors") == "1"
    assert "no points" in text_of(gate)


def test_hostile_names_are_text() -> None:
    gate = result(replace(SLOW, words=HOSTILE), point=HOSTILE, words=(HOSTILE,))
    suite = ET.fromstring(render_gate_junit(gate)).find("testsuite")
    assert "<script>" in suite.get("name")
    markdown = render_gate_markdown(gate)
    assert "<script" not in markdown
    assert "\x1b" not in markdown + text_of(gate)
    (row,) = [line for line in markdown.splitlines() if "tep&#95;time&#95;s" in line]
    assert row.count("|") == 8


@pytest.mark.parametrize("verdict", GateVerdict)
def test_every_verdict_has_an_exit_code_and_a_rank(verdict: GateVerdict) -> None:
    assert verdict in EXIT_CODES
    assert worst([verdict]) is verdict
    assert (EXIT_CODES[verdict] == 0) == (verdict in (GateVerdict.PASS, GateVerdict.IMPROVEMENT))


def test_the_worst_decides() -> None:
    assert worst([GateVerdict.PASS, GateVerdict.REGRESSION, GateVerdict.NOT_RUN]) is GateVerdict.REGRESSION
    assert worst([GateVerdict.PASS, GateVerdict.INCONCLUSIVE]) is GateVerdict.INCONCLUSIVE
    assert worst([GateVerdict.PASS, GateVerdict.IMPROVEMENT]) is GateVerdict.IMPROVEMENT
    assert worst([]) is GateVerdict.NOT_RUN


def test_thousands_of_points_are_cut_with_a_word() -> None:
    gate = replace(
        result(SLOW), points=tuple(PointVerdict(f"t/{i}", GateVerdict.PASS, (), (FINE,)) for i in range(3000))
    )
    markdown = render_gate_markdown(gate)
    assert "1000 more rows are left out" in markdown
    assert len(markdown.encode()) < 1 << 20
