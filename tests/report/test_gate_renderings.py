"""A gate's result on a terminal, as Markdown and as JUnit XML."""

import io
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console

from cloudai_mbridge.gate.renderings import (
    findings,
    headline,
    render_gate,
    render_gate_junit,
    render_gate_markdown,
    render_gate_table,
)
from cloudai_mbridge.gate.verdict import EXIT_CODES, GateResult, GateVerdict, MetricVerdict, PointVerdict, worst
from tests.cases import every
from tests.golden import Sentence

HOSTILE = "<script>alert('1')</script>|`x`\"&\x1b[31m😀" + "p" * 300
SLOW = MetricVerdict("step_time_s", GateVerdict.REGRESSION, "+5.00 % (1 to 1.05)", "s", True, 1.0, 1.05, 0.05)
SLOW = replace(SLOW, interval=(0.04, 0.06), num_runs=5, num_baseline_runs=4)
FINE = MetricVerdict("loss_curve", GateVerdict.PASS, "within", "", True, 6.0, 6.0, 0.0)
DOUBT = MetricVerdict("step_time_mean_s", GateVerdict.INCONCLUSIVE, "cannot be ruled out", "s", False)


def result(*metrics: MetricVerdict, point: str = "t/p", words: tuple[str, ...] = ()) -> GateResult:
    verdict = worst([m.verdict for m in metrics if m.decides and not m.waived] or [GateVerdict.PASS])
    points = (PointVerdict(point, verdict, words, metrics),)
    changes = {"packages.torch": ("2.12.0", "2.13.0")}
    return GateResult("default", "baseline b.toml", verdict, points, 0.01, ("a note",), changes)


def text_of(gate: GateResult) -> str:
    return "\n".join(line for line, _ in render_gate(gate))


def table_of(gate: GateResult) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_gate_table(gate))
    return console.export_text()


def test_all_say_verdict_numbers_and_changes() -> None:
    gate = result(SLOW, FINE)
    text, table, markdown = text_of(gate), table_of(gate), render_gate_markdown(gate)
    for words in ("2.12.0 → 2.13.0", "a note", "regression", "+5.00%"):
        assert words in table
        assert words in markdown
    assert text.splitlines() == [
        "t/p is 5.0 % slower: 1 -> 1.05 s",
        "  step_time_s: +5.00 % (1 to 1.05)",
        "changed: packages.torch 2.12.0 -> 2.13.0",
        "note: a note",
        "REGRESSION: 1 regression; false-alarm rate at most 1.0%; compared with baseline b.toml",
    ]
    assert markdown.startswith("# ❌ t/p is 5.0 % slower: 1 -&#62; 1.05 s\n")


def gate_of(*points: PointVerdict, shared: tuple[PointVerdict, ...] = ()) -> GateResult:
    verdict = worst(point.verdict for point in (*shared, *points))
    return GateResult("default", "baseline b.toml", verdict, points, 0.01, shared=shared)


def slower(point: str, change: float) -> PointVerdict:
    metric = replace(SLOW, change=change, value=1 + change)
    return PointVerdict(point, GateVerdict.REGRESSION, (), (metric,))


def passed(change: float, lower: float, upper: float) -> MetricVerdict:
    return replace(SLOW, verdict=GateVerdict.PASS, change=change, value=1 + change, interval=(lower, upper))


PASSES = tuple(PointVerdict(f"t/p{i}", GateVerdict.PASS, (), (passed(0.002, -0.01, 0.009),)) for i in range(3))


def test_the_first_line_is_the_worst_finding(sentence: Sentence) -> None:
    sentence(headline(gate_of(*PASSES)))
    several = gate_of(*PASSES, slower("t/a", 0.02), slower("t/b", 0.057))
    sentence(headline(several))
    assert [text for _, text in findings(several)] == [
        "t/b is 5.7 % slower: 1 -> 1.057 s",
        "t/a is 2.0 % slower: 1 -> 1.02 s",
    ]
    assert "  t/b is 5.7 % slower: 1 -> 1.057 s (+4.00 % to +6.00 %, 5 runs against 4)" in text_of(several).splitlines()
    other_test = gate_of(*PASSES, slower("u/a", 0.02))
    sentence(headline(other_test))
    curve = replace(FINE, verdict=GateVerdict.REGRESSION, change=0.02, value=6.12)
    sentence(headline(result(curve)))
    mixed = gate_of(PointVerdict("t/c", GateVerdict.REGRESSION, (), (curve,)), slower("t/a", 0.02))
    sentence(headline(mixed))


UNDECIDED = replace(SLOW, verdict=GateVerdict.INCONCLUSIVE, decides=False, change=0.7964, interval=(0.0785, 1.9923))
MEAN = replace(UNDECIDED, metric="step_time_mean_s", change=0.02, interval=(-0.1, 0.12))
WAIVED = replace(SLOW, change=0.0764, interval=(0.07, 0.08), waived="waived until 2026-12-31 by anna: known")
REFUSED = MetricVerdict("step_time_s", GateVerdict.NOT_COMPARABLE, "another device", "s", decides=False)
FOLLOWER = MetricVerdict("tflops_per_gpu", GateVerdict.INCONCLUSIVE, "follows step_time_s", decides=False)
DOUBTED = "not decided: step_time_s of b +79.64 % (+7.85 % to +199.23 %)"
OTHER = "no other point is more than 1 % slower than the baseline (1 point)"


@every(
    "metrics, text, sign",
    [
        ([passed(-0.02, -0.03, -0.011)], "no point is slower than the baseline (1 point)", "✅"),
        ([passed(0.0082, 0.0073, 0.0091)], "no point is more than 1 % slower than the baseline (1 point)", "✅"),
        ([passed(0.015, -0.001, 0.0251)], "no point is more than 3 % slower than the baseline (1 point)", "✅"),
        ([passed(0.005, 0, 0.03)], "no point is more than 3 % slower than the baseline (1 point)", "✅"),
        ([UNDECIDED, FOLLOWER], DOUBTED, "⚠️"),
        ([MEAN, UNDECIDED], f"{DOUBTED}, and 1 more", "⚠️"),
        (
            [passed(0, -0.01, 0.01), MEAN],
            "no point is more than 1 % slower than the baseline (1 point); not decided: step_time_mean_s of b +2.00 %"
            " (-10.00 % to +12.00 %)",
            "✅",
        ),
        ([REFUSED], "not decided: step_time_s of b", "⚠️"),
        ([WAIVED], "waived: step_time_s of b +7.64 % (+7.00 % to +8.00 %)", "✅"),
        ([FINE], "nothing is worse than the baseline beyond the policy's limits (1 point)", "✅"),
    ],
)
def test_a_green_headline_claims_only_what_the_bounds_rule_out(
    metrics: list[MetricVerdict], text: str, sign: str
) -> None:
    """Metrics of a point b -> the first line, and its sign in the comment on a pull request."""
    b = PointVerdict("b", GateVerdict.PASS, (), tuple(metrics))
    assert headline(gate_of(b)) == text
    assert render_gate_markdown(gate_of(b)).startswith(f"# {sign} ")
    fine = PointVerdict("a", GateVerdict.PASS, (), (passed(0, -0.01, 0.009),))
    if text.startswith(("not decided", "waived")):
        assert headline(gate_of(fine, b)) == f"{OTHER}; {text}"
    faster = replace(SLOW, verdict=GateVerdict.IMPROVEMENT, change=-0.1, value=0.9)
    best = headline(gate_of(PointVerdict("c", GateVerdict.IMPROVEMENT, (), (faster,)), b))
    assert best.startswith("c is 10.0 % faster: 1 -> 0.9 s")
    assert best.endswith(text) or not text.startswith(("not decided", "waived"))


def test_what_points_share_is_told_first_and_once(sentence: Sentence) -> None:
    words = "all 40 points are 1.10 % slower (95 % bounds +1.0 % and +1.2 %); beyond the margin of +0.50 %, p = 0.001"
    together = replace(SLOW, baseline=None, value=None, change=0.011, words=words)
    gate = gate_of(*PASSES, shared=(PointVerdict("all 40 points", GateVerdict.REGRESSION, (), (together,)),))
    sentence(headline(gate))


def test_some_good_runs_are_not_called_not_run() -> None:
    words = ("4 of 5 runs were good; 5 are needed: exit code 1",)
    gate = gate_of(*PASSES, PointVerdict("t/mb4", GateVerdict.NOT_RUN, words, runs=("a", "b", "c", "d")))
    assert headline(gate) == f"t/mb4: {words[0]}"
    for text in (text_of(gate), table_of(gate), render_gate_markdown(gate)):
        assert "4 of 5 runs were good" in text
        assert "incomplete" in text
        assert "not run" not in text.lower()
    (failure,) = ET.fromstring(render_gate_junit(gate)).iter("failure")
    assert failure.get("message") == f"t/mb4: {words[0]}"


def test_an_undecided_point_says_what_would_decide_it(sentence: Sentence) -> None:
    words = "+1.50 % (1 to 1.015, 95 % bounds -1.00 % and +4.00 %, 2 runs against 5); the result has only 2 runs"
    doubt = replace(SLOW, verdict=GateVerdict.INCONCLUSIVE, words=words)
    sentence(headline(result(doubt)))


def test_many_points_and_notes_are_cut() -> None:
    notes = tuple(f"note {i}" for i in range(30))
    gate = replace(gate_of(*(slower(f"t/{i}", 0.05) for i in range(300))), notes=notes)
    lines = text_of(gate).splitlines()
    assert len(lines) < 30
    assert "  and 280 more" in lines
    assert "- and 280 more" in render_gate_markdown(gate)


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
    assert "regression (waived)" in table_of(gate)
    assert text_of(gate).startswith("waived: step_time_s of t/p +5.00 % (+4.00 % to +6.00 %)\nwaived: t/p")
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
    assert "\x1b" not in markdown + text_of(gate) + table_of(gate)
    (row,) = [line for line in markdown.splitlines() if "tep&#95;time&#95;s" in line]
    assert row.count("|") == 8


def test_a_tests_only_point_is_the_test_and_much_slower_is_in_times(sentence: Sentence) -> None:
    sentence(headline(gate_of(slower("nightly/single", 7.49))))


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
