"""What the page shows, in a real browser."""

import io
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.report.read import report_of
from cloudai_mbridge.report.terminal import render_ending
from tests.figures import Figure
from tests.report.html.conftest import Open, Opened
from tests.report.html.make_report import (
    make_died,
    make_failed,
    make_gate,
    make_history,
    make_nodes,
    make_point,
    make_rejected,
    make_report,
    make_search,
    make_sweep,
)

pytestmark = pytest.mark.process

SECTIONS = [
    "gate",
    "table",
    "curves",
    "distribution",
    "sensitivity",
    "parallel",
    "pareto",
    "predicted",
    "nodes",
    "failures",
    "rejected",
    "excluded",
    "history",
    "environment",
]
BIG_AXES = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "cp": [1, 2, 4],
    "mb": [1, 2, 4, 8],
    "gb": [128, 256, 512],
    "seq_length": [2048, 4096, 8192],
    "vp": [1, 2, 4],
}


@pytest.fixture(scope="module")
def sweep(show: Open) -> Opened:
    points = make_sweep(repeats=2)
    report = make_report(points, notes=["seed 0"], excluded_nodes={"gb200-9": "the pre-test failed on it"})
    return show(report, make_history(), make_gate())


def text_of(opened: Opened, section: str) -> str:
    return opened.page.inner_text(f"section#{section}")


def num_paths(opened: Opened, section: str) -> int:
    return opened.page.locator(f"section#{section} figure svg path").count()


def test_everything_is_there_and_nothing_complains(sweep: Opened) -> None:
    found = sweep.page.eval_on_selector_all("main > section", "all => all.map(s => s.id)")
    assert found == SECTIONS
    for section in ("curves", "distribution", "sensitivity", "parallel", "pareto", "predicted", "nodes", "history"):
        assert sweep.page.locator(f"section#{section} figure svg").count() >= 1, section
    sweep.assert_quiet()


def test_headline_counts(sweep: Opened) -> None:
    text = sweep.page.inner_text("#headline")
    for part in ("gpt_sweep on gb200", "160", "14", "9", "2026-11-21 11:38 UTC", "megatron-bridge/new", "seed 0"):
        assert part in text
    assert sweep.page.title() == "gpt_sweep on gb200: benchmark report"


def test_it_opens_on_what_the_terminal_ends_with(show: Open) -> None:
    points = [
        *(make_point("mb1", {"mb": 1}, iteration=i, time_s=4.0) for i in range(2)),
        *(make_point("mb4", {"mb": 4}, iteration=i, time_s=3.0, rng=random.Random(i + 5)) for i in range(2)),
        *(make_point("mb2", {"mb": 2}, iteration=i, time_s=3.0, rng=random.Random(i)) for i in range(2)),
        *(make_died(f"tp{i}", {"mb": 1}) for i in range(5)),
        make_rejected("gb100", {"mb": 2}),
    ]
    report = make_report(points)
    opened = show(report)
    shown = " ".join(opened.page.inner_text("#headline").split())
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(render_ending(report_of(report), 1000))
    lines = [" ".join(line.replace("| ", "").split()) for line in console.export_text().splitlines()]
    told = [line for line in lines if line.startswith(("fastest", "failed", "rejected", "mean", "torch."))]
    assert len(told) == 4
    assert all(line in shown for line in told), told
    assert "within noise of it" in told[0]
    assert shown.index("fastest") < shown.index("success") < shown.index("GPU-hours")


def test_tokens_rank_what_does_different_work(show: Open) -> None:
    small, large = make_point("gb8", time_s=1.0), make_point("gb64", time_s=4.0, tokens=8 * 8192.0)
    opened = show(make_report([small, large]))
    assert opened.names() == ["gb64", "gb8"]
    assert opened.page.get_attribute("th[data-column=tokens_per_s_per_gpu]", "aria-sort") == "descending"


def test_a_policy_forbids_every_request(sweep: Opened) -> None:
    policy = sweep.page.get_attribute("meta[http-equiv=Content-Security-Policy]", "content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    script_rule = policy.split("script-src")[1].split(";")[0]
    assert "unsafe-inline" not in script_rule


def test_charts_say_what_they_show_and_have_numbers(sweep: Opened) -> None:
    for svg in sweep.page.query_selector_all("main figure .plot > [role=img]"):
        assert len(svg.get_attribute("aria-label")) > 20
    sweep.page.click("#pareto figure summary")
    sweep.page.locator("#pareto figure table tbody tr").nth(100).wait_for(state="attached")
    sweep.page.click("#pareto figure summary")


def test_gate_panel_names_the_worst_first(sweep: Opened) -> None:
    text = text_of(sweep, "gate")
    assert "3 points: 1 regression, 1 not run, 1 pass." in text
    assert sweep.page.inner_text("#headline .fastest >> nth=0") == "Gate: ✗ regression: b is 5.0 % slower: 4 -> 4.2 s"
    assert "4.20 s against 4.00 s" in text
    assert text.index("sweep/b") < text.index("sweep/c")
    first = sweep.page.inner_text("#gate .region[aria-label^=Metrics] tbody tr")
    assert "regression" in first
    assert "+5.00 %" in first


def test_without_a_gate_there_is_no_panel(show: Open) -> None:
    opened = show(make_report([make_point("a")]))
    assert opened.page.locator("#gate, #searches, #node-map, #rehearsed").count() == 0


def test_the_map_of_nodes(show: Open) -> None:
    opened = show(make_report([make_point("a")]), nodes=make_nodes())
    text = text_of(opened, "node-map")
    assert "24 nodes: ▲ 2 slow, ✓ 21 normal, ? 1 too few runs; from 81 runs." in text
    assert "false-alarm rate of at most 1.0 %, and normal if 3 % or more is ruled out" in text
    assert "gb200-004: governor is powersave; 23 others have performance" in text
    cells = opened.page.locator("#node-map .node")
    assert cells.count() == 24
    assert [cells.nth(i).get_attribute("class") for i in (0, 3, 23)] == ["node normal", "node slow", "node too"]
    assert "+5.20 %" in cells.nth(3).inner_text()
    opened.page.click("#node-map summary")
    first = opened.page.locator("#node-map table tbody tr").first
    first.wait_for(state="attached")
    assert first.inner_text().split("\t") == ["gb200-004", "+5.20 %", "+4.40 % … +6.00 %", "4", "▲ slow"]
    opened.assert_quiet()


def test_a_search_shows_its_trials(show: Open) -> None:
    opened = show(make_report([make_point("a"), make_point("d")], searches=[make_search()]))
    text = text_of(opened, "searches")
    assert "4 of 60 points tried, 2 GPU-hours. Best: d, 3.6 s a step, then a: 4 s." in text
    assert (
        "2 measured, 1 ended early, 1 out of memory; measured over predicted: 1.27 (median); with probability" in text
    )
    assert "sweep/d/0/test.toml" in text
    assert opened.page.locator("#searches figure svg circle").count() >= 3
    opened.page.click("#searches figure summary")
    row = opened.page.locator("#searches figure table tbody tr").nth(1)
    row.wait_for(state="attached")
    assert row.inner_text().split("\t") == ["2", "<b>", "ended early", "1", "5.5", "3", "0.5"]
    opened.assert_quiet()


def test_a_search_without_a_success(show: Open) -> None:
    nothing = dict.fromkeys(("best", "best_definition", "step_time_s", "runner_up", "runner_up_s"))
    trials = [trial for trial in make_search()["trials"] if trial["outcome"] == "out of memory"]
    opened = show(make_report([make_died("c")], searches=[make_search(trials=trials, **nothing)]))
    assert "none succeeded" in text_of(opened, "searches")
    assert "No trial has a step time." in text_of(opened, "searches")
    opened.assert_quiet()


def test_what_was_rehearsed(show: Open) -> None:
    asked = {"stack": "Megatron-Core 0.16.1", "is_job_stack": True}
    good = {"test_id": "sweep", "label": "a", "verdict": "starts", "reason": "", "ranks": 6, "built": 6, **asked}
    bad = {**good, "label": "<b>", "verdict": "refused", "reason": "model: <i>no</i>", "built": 5, "states": {}}
    opened = show(make_report([make_point("a")], rehearsed=[{**good, "states": {"parameters": 12345}}, bad]))
    assert "1 start, 1 refused. The ranks were built by the training program itself" in text_of(opened, "rehearsed")
    rows = opened.page.locator("#rehearsed tbody tr")
    assert rows.nth(0).inner_text().split("\t") == ["a", "starts", "6/6", "12,345", "Megatron-Core 0.16.1", ""]
    assert rows.nth(1).inner_text().split("\t")[0::5] == ["<b>", "model: <i>no</i>"]
    opened.assert_quiet()


def test_axis_sensitivity_ranks_the_axes(sweep: Opened) -> None:
    rows = sweep.page.eval_on_selector_all(
        "#sensitivity .region[aria-label='Effect of each axis'] tbody tr th", "all => all.map(th => th.textContent)"
    )
    assert rows == ["mb", "tp", "pp", "gb"]


def test_the_slow_node_stands_out(sweep: Opened) -> None:
    ticks = sweep.page.locator("#nodes svg [data-mark='y-axis tick label'] text").all_text_contents()
    assert ticks[0] == "gb200-3"


def test_pareto_front_has_no_point_that_another_one_beats(sweep: Opened) -> None:
    rows = sweep.page.locator("#pareto [aria-label='Runs on the front'] tbody tr")
    texts = rows.evaluate_all("rows => rows.map(r => [r.children[2].innerText, r.children[3].innerText])")
    numbers = [[float(text.replace(",", "")) for text in row] for row in texts]
    assert len(numbers) > 3
    assert numbers == sorted(numbers)
    assert all(a[1] <= b[1] for a, b in pairwise(numbers))


def test_failures_show_their_evidence(sweep: Opened) -> None:
    text = text_of(sweep, "failures")
    assert "A GPU ran out of memory" in text
    assert "stderr.txt:212: torch.OutOfMemoryError: CUDA out of memory." in text
    assert "raise tp or pp, lower mb" in text


def test_rejected_points_by_rule(sweep: Opened) -> None:
    assert "9 points rejected before running" in text_of(sweep, "rejected")
    sweep.page.click("#rejected summary")
    sweep.page.locator("#rejected").get_by_text("use a multiple of 8").first.wait_for()


def test_history_marks_the_run_where_the_level_moved(sweep: Opened) -> None:
    text = text_of(sweep, "history")
    assert "step time moved up by 5.0 % at run0020" in text
    assert "new against the run before: driver 565.57.01 -> 570.86.15" in text
    assert sweep.page.locator("#history figure svg [data-mark=rule] line").count() == 1


def test_environment_says_common_things_once_and_marks_the_odd_ones(sweep: Opened) -> None:
    marks = sweep.page.locator("[data-group=environment] .differs").all_text_contents()
    assert "≠\u00a0565.57.01" in marks
    table = sweep.page.inner_text("[data-group=environment] .region")
    assert "570.86.15" in table
    assert "NVIDIA GB200" not in table


@pytest.mark.parametrize("points", [[], [make_rejected("r")], [make_died("d")]], ids=["none", "rejected", "died"])
def test_what_is_empty_says_so(show: Open, points: Any) -> None:
    opened = show(make_report(points))
    for section in SECTIONS[2:9]:
        assert opened.page.locator(f"section#{section} svg:not(.swatch)").count() == 0
        assert opened.page.locator(f"section#{section} .empty").first.is_visible(), section
    for section in ("excluded", "history"):
        assert opened.page.locator(f"section#{section} .empty").is_visible()
    assert opened.page.inner_text("#count") == f"{len(points)} of {len(points)} rows"
    opened.assert_quiet()


def test_one_point(show: Open) -> None:
    opened = show(make_report([make_point("only", {"tp": 1})]))
    assert opened.page.locator("#curves figure svg").count() == 2
    assert "there is no axis to compare" in text_of(opened, "sensitivity")
    assert opened.page.locator("#pareto figure svg").count() == 1
    opened.assert_quiet()


def test_a_nan_loss_is_told_and_drawn(show: Open) -> None:
    opened = show(make_report([make_failed("bad")]))
    assert "bad: NaN from step 8" in text_of(opened, "curves")
    assert opened.column("loss")[0].endswith("→ NaN")
    crosses = opened.page.locator("#curves figure:nth-of-type(2) svg [data-mark=dot] path").count()
    assert crosses == 13
    opened.assert_quiet()


def test_only_nan_losses(show: Open) -> None:
    point = make_failed("bad")
    for step in point["steps"]:
        step["loss"] = "nan"
    point["metrics"]["first_loss"] = "nan"
    opened = show(make_report([point]))
    assert "The selected runs have no finite loss." in text_of(opened, "curves")
    opened.assert_quiet()


def test_infinite_numbers(show: Open) -> None:
    point = make_point("endless")
    point["metrics"]["step_time_s"] |= {"mean": "inf", "capped_mean": "inf"}
    point["metrics"]["peak_memory_gib"] = "nan"
    point["steps"][5]["step_time_s"] = "inf"
    opened = show(make_report([point, make_point("good")]))
    assert opened.column("step_time_s")[1] == "∞"
    assert opened.column("peak_memory_gib")[1] == "NaN"
    assert "endless: ∞ from step 6" in text_of(opened, "curves")
    opened.assert_quiet()


def test_a_missing_number_says_why(show: Open) -> None:
    opened = show(make_report([make_died("d"), make_rejected("r"), make_point("m", memory_gib=None)]))
    cells = opened.page.eval_on_selector_all(
        "#rows td.number .missing", "all => all.map(cell => [cell.textContent, cell.title])"
    )
    reasons = {title for _, title in cells}
    assert reasons == {"no step was logged", "the point was rejected and did not run", "the log tells no memory"}
    assert all(text == f"– missing: {title}" for text, title in cells)


def test_checks_of_nodes_compare_nodes_and_are_no_points(show: Open) -> None:
    checks = [
        make_point(f"n{i}", test_id="pre_test", node=f"n{i}", time_s=2.0 + 0.2 * (i == 2), is_pre_test=True)
        for i in range(4)
    ]
    opened = show(make_report([*checks, make_point("a")]))
    assert opened.page.locator("#nodes svg [data-mark='y-axis tick label'] text").first.text_content() == "n2"
    assert opened.page.locator("#pareto figure svg [data-mark=dot] circle").count() == 3  # a dot, the front, a ring


def cpu_seconds(browser: Any) -> float:
    """Return what the browser has computed so far: unlike time on the wall, it hardly depends on who else computes."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return sum(process["cpuTime"] for process in processes)


def test_five_thousand_points(browser: Any, show: Open, figure: Figure) -> None:
    report = make_report(make_sweep(BIG_AXES, num_steps=50, most=5000))
    start, started = cpu_seconds(browser), time.perf_counter()
    opened = show(report)
    loaded, drawn = cpu_seconds(browser), time.perf_counter()
    opened.filter("tp=8 gb=512")
    filtered = cpu_seconds(browser)
    assert opened.page.inner_text("#count") == "369 of 5,000 rows"
    opened.page.click("th[data-column=step_time_s] button")
    assert opened.page.get_attribute("th[data-column=step_time_s]", "aria-sort") == "descending"
    assert opened.page.locator("#rows tr[data-run]").count() == 200
    size = opened.path.stat().st_size / 1e6
    figure(
        f"5,000 points of 50 steps: {size:.1f} MB, rendered and drawn in {drawn - started:.1f} s, of which"
        f" {loaded - start:.1f} s of computing in the browser; filtered in {filtered - loaded:.1f} s of computing"
    )
    assert loaded - start < 8
    assert filtered - loaded < 4
    opened.assert_quiet()


def test_cancelled_runs_have_a_group_and_a_count_of_their_own(show: Open) -> None:
    points = make_sweep(repeats=1)
    told = {"verdict": "cancelled", "reasons": ["mbridge was stopped"], "evidence": [], "failure": None}
    points += [make_died(f"stopped{i}", dict(points[0]["coordinates"]), **told) for i in range(4)]
    opened = show(make_report(points))
    assert not opened.errors
    assert "4" in opened.page.inner_text("ul.tiles li:has-text('cancelled')")
    assert "Cancelled — 4 runs" in text_of(opened, "failures")
    assert "cancelled" not in show(make_report(make_sweep(repeats=1))).page.inner_text("ul.tiles")
