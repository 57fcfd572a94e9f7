"""A point has one step time: every place that prints or exports one has the same, under the same name."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import cloudai_mbridge as mb
from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.run.watch import Screen
from cloudai_mbridge.errors import BadInput, Damaged
from cloudai_mbridge.export import gauges, table
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.runs import read_results
from cloudai_mbridge.metrics import MEASURES, summarize
from cloudai_mbridge.plan.profiling import profiled_steps, upstream_profiling
from cloudai_mbridge.report.rows import number_of
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict
from tests.cases import every
from tests.commands.conftest import Run, mbridge_here
from tests.golden import Sentence
from tests.report.conftest import COMPLETED, EMBEDDED, ARun, a_log

__all__ = ["Run", "mbridge_here"]
# Steps 3 to 8 count: one hiccup, which the plain mean follows and the capped one does not
TIMES = (9.0, 5.0, 0.5, 0.52, 0.5, 4.0, 0.51, 0.5)
CAPPED, PLAIN, LAST = (0.5 * 3 + 0.52 + 0.51 + 1.1 * 0.505) / 6, (0.5 * 3 + 0.52 + 0.51 + 4.0) / 6, 0.5
TEST = {**EMBEDDED, "cmd_args": {**EMBEDDED["cmd_args"], "max_steps": len(TIMES), "mb": [1, 2]}}


def log_of(times: tuple[float, ...], **changes: dict[int, Any]) -> str:
    """Return the log of a run. changes: of fields of records, by step."""
    head, *records = a_log(len(times)).splitlines()
    lines = [head]
    for step, (record, time) in enumerate(zip(records, times, strict=True), 1):
        mark, _, text = record.partition(" ")
        own = {name: by_step[step] for name, by_step in changes.items() if step in by_step}
        lines.append(f"{mark} {json.dumps({**json.loads(text), 'step_time_s': time, **own})}")
    return "\n".join(lines) + "\n"


def ended(root: Path, test: dict[str, Any] = TEST, trace: str = "", **changes: dict[int, Any]) -> ARun:
    """Return a run with two points that have ended. changes: of the first one's records; trace: its profiler's file."""
    run = ARun(root, test)
    run.ended("t/mb1/0", log_of(TIMES, **changes), replace(COMPLETED, run_time_s=36.0))
    run.ended("t/mb2/0", log_of(tuple(3 * time for time in TIMES)), replace(COMPLETED, run_time_s=36.0))
    if trace:
        path = root / "t/mb1/0" / trace
        path.parent.mkdir()
        path.write_text("{}")
    with closing(Journal(run.root / "journal.sqlite")) as journal:
        for key in ("t/mb1/0", "t/mb2/0"):
            journal.decided(key, Verdict.SUCCESS, ())
    pipeline.report(run.root)
    return run


def number_in(text: str, before: str, after: str = "") -> float:
    found = re.search(rf"{before}\s*([0-9.]+){after}", text)
    assert found, (before, text)
    return float(found[1])


def places(run: ARun, mbridge: Run, tmp_path: Path) -> Iterator[tuple[str, float]]:
    """Yield every place with the step time that it has."""
    root = run.root
    report = json.loads((root / "report.json").read_text())
    yield "report.json", report["points"][0]["metrics"]["step_time_s"]["capped_mean"]
    yield "report.txt", number_in((root / "report.txt").read_text(), "step time")
    yield "the run's report.txt", number_in((root / "t/mb1/0/report.txt").read_text(), "\nStep time:")
    yield "report.md", number_in((root / "report.md").read_text(), r"mb1[^|]*\| success \|[^|]*\|")
    cases = ET.parse(root / "junit.xml").iter("property")
    junit = next(case.get("value") for case in cases if case.get("name") == "step_time_s")
    yield "junit.xml", number_in(junit or "", "")
    page = (root / "report.html").read_text()
    yield "report.html", number_in(page, r"fastest: \S+", " s a step")
    yield "show", number_in(mbridge("show", root)[1], r"│ mb1 +│ success +│ +8/8 │")
    yield "show POINT", number_in(mbridge("show", root, "mb1")[1], "Step time:")
    (listed,) = json.loads(mbridge("runs", "--json", "--output-dir", tmp_path)[1])["runs"]
    yield "runs", listed["best"]["step_time_s"]
    rows = list(csv.DictReader(io.StringIO(mbridge("export", root, "--to", "csv")[1])))
    yield "csv", float(rows[0]["step_time_s"])
    by_point = list(csv.DictReader(io.StringIO(mbridge("export", root, "--to", "csv", "--by", "point")[1])))
    yield "csv --by point", float(by_point[0]["step_time_s"])
    parquet = tmp_path / "points.parquet"
    mbridge("export", root, "--to", "parquet", "-o", parquet)
    yield "parquet", pytest.importorskip("pyarrow.parquet").read_table(parquet).to_pylist()[0]["step_time_s"]
    prometheus = mbridge("export", root, "--to", "prometheus")[1]
    yield "prometheus", number_in(prometheus, r"\nmbridge_step_time_seconds\{[^}]*\}")
    exported = table.read_table(root)
    sample = next(value for gauge, _, value in gauges.samples(exported) if gauge.name == "step_time")
    yield "otel", sample
    yield "mlflow and wandb", table.metrics(exported.ran[0])["step_time_s"]
    api = mb.open_run(root).report()
    yield "Python, rows", api.table.rows[0]["step_time_s"]
    pytest.importorskip("pandas")
    yield "Python, pandas", api.to_pandas()["step_time_s"][0]
    yield "Python, fastest", api.fastest["t"].step_time_s.capped_mean
    result = read_results(root)[0]
    yield "gate", result.values["step_time_s"][0]
    with History(tmp_path / "history.sqlite") as history:
        history.import_report(root / "report.json")
        series = history.series(result.comparability_id, "step_time_s", 10)
    yield "history", series.runs[0][2] or 0.0
    console = Console(file=io.StringIO(), force_terminal=True, width=120, record=True)
    screen = Screen(console, run.plan, root)
    screen.saw(run.plan.runs[0], JobStatus("RUNNING", JobClass.ACTIVE))
    console.print(screen.render())
    yield "live screen, running", number_in(console.export_text(), r"mb1 +RUNNING +8/8")
    screen.decided(run.plan.runs[0], Verdict.SUCCESS, ())
    console.print(screen.render())
    yield "live screen, ended", number_in(console.export_text(), r"mb1 +success +8/8")


def test_every_place_has_the_same_step_time(mbridge_here: Run, tmp_path: Path) -> None:
    run = ended(tmp_path / "s_2026-11-01_02-00-00")
    found = dict(places(run, mbridge_here, tmp_path))
    assert len(found) >= 12
    wrong = {name: value for name, value in found.items() if value != pytest.approx(CAPPED, rel=2e-3)}
    assert not wrong, f"{CAPPED:.4g} is right, {PLAIN:.4g} is the plain mean, {LAST} the last step"
    row = next(csv.DictReader(io.StringIO(mbridge_here("export", run.root, "--to", "csv")[1])))
    assert float(row["step_time_mean_s"]) == pytest.approx(PLAIN), "the plain mean has a name of its own"


def test_steps_that_are_no_measurements_count_nowhere(mbridge_here: Run, tmp_path: Path) -> None:
    """The optimizer skips steps 3 and 4, whose loss is printed as 0; a profiler covers 6 and 7."""
    test = {**TEST, "cmd_args": {**TEST["cmd_args"], "pytorch_profiler": True, "profiling_start_step": 6}}
    test["cmd_args"]["profiling_stop_step"] = 7
    skipped = {"skipped_iterations": {3: 1, 4: 1, 8: 1}, "losses": {key: {"lm loss": 0.0} for key in (3, 4, 8)}}
    trace = "torch_profile/rank-0.17.pt.trace.json"
    run = ended(tmp_path / "s_2026-11-01_02-00-00", test, trace, **skipped)
    (point, other) = json.loads((run.root / "report.json").read_text())["points"][:2]
    metrics = point["metrics"]
    assert point["verdict"] == "success"
    assert (metrics["step_time_s"]["n"], metrics["step_time_s"]["capped_mean"]) == (1, 0.5), "step 5 alone is left"
    assert (metrics["first_loss"], metrics["last_loss"]) == (6.875, 6.125), "the loss of step 7, not 0"
    text = " ".join(mbridge_here("show", run.root, "mb1")[1].split())
    assert "the optimizer skipped 3 steps, which are no measurements: 3-4 and 8" in text
    assert f"profiled: steps 6-7, which are no measurements; traces: {trace}" in text
    assert "Step time: 0.5 s (median" in text, "one step has no spread"
    assert "5-5 (n=1), warm-up 1-2, 3-4 and 8 skipped by the optimizer, 6-7 profiled left out" in text
    rows = list(csv.DictReader(io.StringIO((run.root / "steps.csv").read_text())))
    assert [row["step"] for row in rows if row["counted"] == "true" and row["label"] == "mb1"] == ["5"]
    assert trace in (run.root / "report.html").read_text()
    assert other["metrics"]["step_time_s"]["n"] == 3, "the profiler is on in both points"


def test_a_run_of_skipped_steps_fails(tmp_path: Path) -> None:
    skipped = dict.fromkeys(range(1, 9), 1)
    lost = {key: {"lm loss": 0.0} for key in range(1, 9)}
    run = ended(tmp_path / "s_2026-11-01_02-00-00", skipped_iterations=skipped, losses=lost)
    point = json.loads((run.root / "report.json").read_text())["points"][0]
    assert (point["verdict"], point["metrics"]["last_loss"]) == ("failed", None)
    assert "step time could not be measured" in point["reasons"]


@every(
    "overrides, args, window",
    [
        ({}, {"enable_nsys": True}, (11, 12)),
        ({}, {"pytorch_profiler": True, "profiling_start_step": 4, "profiling_stop_step": 6}, (4, 7)),
        ({"profiling.use_pytorch_profiler": "True"}, {}, (10, 13)),
        ({"profiling.use_nsys_profiler": "true", "profiling.profile_step_start": "3"}, {}, (4, 13)),
        ({}, {"profiling_start_step": 4}, None),
        ({"profiling.profile_step_start": "20", "profiling.use_nsys_profiler": "true"}, {}, None),
    ],
)
def test_steps_that_the_launchers_profiler_slows(
    overrides: dict[str, str], args: dict[str, Any], window: tuple[int, int] | None
) -> None:
    unset = dict.fromkeys(("enable_nsys", "pytorch_profiler", "profiling_start_step", "profiling_stop_step"))
    given = SimpleNamespace(**{**unset, **args})
    assert profiled_steps(upstream_profiling(given, overrides)) == window  # type: ignore[arg-type]


@every("start, stop, is_measured", [(3, 8, False), (2, 7, False), (4, 8, True), (3, 6, True), (20, 22, True)])
def test_a_profiler_leaves_a_step_to_measure(
    tmp_path: Path, sentence: Sentence, start: int, stop: int, is_measured: bool
) -> None:
    """Two steps of warm-up, of eight: one that is slowed by the profiler from the third to the last is refused."""
    window = {"pytorch_profiler": True, "profiling_start_step": start, "profiling_stop_step": stop}
    test = {**TEST, "cmd_args": {**TEST["cmd_args"], **window}}
    if is_measured:
        assert ARun(tmp_path / "run", test).plan.runs
    else:
        with pytest.raises(BadInput) as caught:
            ARun(tmp_path / "run", test)
        sentence(caught)


def test_a_plan_with_a_damaged_window_is_damaged(tmp_path: Path) -> None:
    root = ended(tmp_path / "s_2026-11-01_02-00-00").root
    plan = root / "plan.json"
    for window in ([], [3], ["a", 4], {"first": 1}):
        data = json.loads(plan.read_text())
        data["runs"][0]["profiled"] = window
        plan.write_text(json.dumps(data))
        with pytest.raises(Damaged, match=r"runs\.0\.profiled"):
            pipeline.report(root)


def test_one_step_has_no_spread_and_a_points_last_loss_is_the_mean_of_its_runs() -> None:
    time, loss = (next(each for each in MEASURES if each.name == name) for name in ("step_time_s", "last_loss"))
    one, two = summarize([0.5]), summarize([0.5, 0.6])
    assert [number_of(each, "capped_std") is None for each in (None, one, two)] == [True, True, False]
    assert (number_of(one, "capped_mean"), time.over_runs([one])) == (0.5, one)
    assert (loss.over_runs([4.0, 5.0]), loss.over_runs([4.0, None]), loss.over_runs([])) == (4.5, None, None)
