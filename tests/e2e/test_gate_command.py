"""`mbridge gate` and `mbridge compare` on report.json files: verdicts, exit codes, bad input, hostile names."""

import csv
import json
import math
import os
import random
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cloudai_mbridge.cli import cli
from cloudai_mbridge.report.model import comparability_id
from tests.cases import every
from tests.gate.history_data import make_point, write_report
from tests.golden import Sentence

HOSTILE = "<script>alert('1')</script>|`x`\"&😀" + "p" * 300
POLICY = 'name = "p"\nbaseline = "baseline.toml"\n'


def comparability(device: str) -> dict[str, Any]:
    fields = {"device": device}
    return {"id": comparability_id(fields), "fields": fields}


def make_report(
    path: Path,
    level: float = 1.0,
    *,
    runs: int = 5,
    seed: int = 1,
    noise: float = 0.01,
    label: str = "p",
    change: Callable[[dict[str, Any]], None] = lambda point: None,
) -> Path:
    """Write a report.json of runs around a level; `change` may do something to every point."""
    rng = random.Random(seed)
    points = []
    for i in range(runs):
        value = level * math.exp(rng.gauss(0, noise))
        times = [value * math.exp(rng.gauss(0, 0.01)) for _ in range(20)]
        steps = [
            {"step": s + 1, "step_time_s": t, "tflops_per_gpu": 100 / t, "loss": 7 - s / 10, "grad_norm": 1.0}
            for s, t in enumerate(times)
        ]
        point = make_point(number=i, label=label, environment={"nodes": [f"n{i}"]}, job={}, num_steps=20)
        point |= {"steps": steps, "attempts": [{"job_id": f"{seed}-{i}", "submitted_at": "2026-11-01T00:00:00+00:00"}]}
        point |= {"comparability": comparability("NVIDIA GB200"), "test_name": "t"}
        point["metrics"] |= {"warmup_steps": 3, "flops_formula": "megatron-bridge/new"}
        points.append(point)
        change(points[-1])
    return write_report(path, points)


@pytest.fixture
def compare(mbridge: Any, tmp_path: Path) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Compare report B with a good report A of five runs."""

    def run(result: Path, *options: str | Path, **baseline: Any) -> tuple[Any, dict[str, Any]]:
        old = make_report(tmp_path / "a.json", **baseline)
        done = mbridge("compare", old, result, "--json", tmp_path / "out.json", *options)
        return done, json.loads((tmp_path / "out.json").read_text()) if done.returncode == 0 else {}

    return run


def test_compare_tells_and_never_fails(compare: Any, tmp_path: Path) -> None:
    for level, verdict in ((1.0, "pass"), (1.08, "regression"), (0.9, "improvement")):
        done, found = compare(make_report(tmp_path / "b.json", level, seed=2))
        assert (done.returncode, found["verdict"]) == (0, verdict), done.stdout


def write_points(path: Path, levels: dict[str, float], seed: int, **changes: Callable[[dict[str, Any]], None]) -> Path:
    """Write a report of several points; `changes` are by label."""
    reports = [
        json.loads(
            make_report(path, level, label=label, seed=seed + i, change=changes.get(label, as_it_is)).read_text()
        )
        for i, (label, level) in enumerate(levels.items())
    ]
    path.write_text(json.dumps({**reports[0], "points": [point for report in reports for point in report["points"]]}))
    return path


def as_it_is(point: dict[str, Any]) -> None:
    point["comparability"] = comparability(point["label"])


def half_of_them(point: dict[str, Any]) -> None:
    as_it_is(point)
    died(point)


def none_of_them(point: dict[str, Any]) -> None:
    as_it_is(point)
    point |= {"verdict": "failed", "reasons": ["exit code 1"]}


def test_the_table_of_old_and_new(mbridge: Any, tmp_path: Path) -> None:
    levels = {"same": 1.0, "slower": 2.0, "faster": 3.0, "died": 1.0, "never": 1.0}
    old = write_points(tmp_path / "old.json", {**levels, "old": 1.0}, 10)
    changes = {"died": half_of_them, "never": none_of_them}
    new = write_points(tmp_path / "new.json", {**levels, "slower": 2.3, "faster": 2.7, "new": 1.0}, 20, **changes)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "csv")}
    done = mbridge("compare", old, new, *(word for name, path in files.items() for word in (f"--{name}", path)))
    assert done.returncode == 0, done.stderr
    rows = {row["point"]: row for row in csv.DictReader(files["csv"].read_text().splitlines())}
    excluded = {name: row["excluded"] for name, row in rows.items() if row["excluded"]}
    assert excluded == {"t/died": "incomplete", "t/never": "failed", "t/old": "only in old", "t/new": "only in new"}
    counted = [row for row in rows.values() if row["num_old"] and not row["excluded"]]
    assert [row["point"] for row in counted] == ["t/same", "t/slower", "t/faster"], "in the order of the reports"
    assert [row["is_significant"] for row in counted] == ["false", "true", "true"]
    mean = math.prod(1 + float(row["change"]) for row in counted) ** (1 / 3) - 1
    assert float(rows["geometric mean"]["change"]) == pytest.approx(mean)
    shown = {line.split("│")[1].strip(): line.split("│")[4].strip() for line in done.stdout.splitlines() if "│" in line}
    percents = [f"{100 * float(row['change']):+.2f} %" for row in counted]
    assert list(shown.values())[:3] == [f"~ {percents[0]}", *percents[1:]]
    assert shown["t/died"].endswith(" %, incomplete")
    assert shown["geometric mean of 3 points"] == f"{100 * mean:+.2f} %"
    assert "4 points not in the mean: 1 incomplete, 1 failed, 1 only in" in " ".join(done.stdout.split())
    markdown = files["markdown"].read_text()
    assert "| t/same |" in markdown
    assert "| &#126; " in markdown
    table = json.loads(files["json"].read_text())["comparison"]
    assert table["excluded"] == {"incomplete": 1, "failed": 1, "only in old": 1, "only in new": 1}


def test_a_metric_that_the_policy_lacks_is_refused(mbridge: Any, tmp_path: Path) -> None:
    old = make_report(tmp_path / "a.json")
    done = mbridge("compare", old, old, "--metric", "tokens_per_s_per_gpu")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("metric", ["tflops_per_gpu", "loss_curve"])
def test_a_policy_without_the_step_time_compares(mbridge: Any, tmp_path: Path, metric: str) -> None:
    """The table is of its first metric that can be better, if any."""
    (tmp_path / "p.toml").write_text(f'name = "p"\nbaseline = "b.toml"\n[[metrics]]\nname = "{metric}"\n')
    old = make_report(tmp_path / "a.json")
    words = ("compare", old, make_report(tmp_path / "b.json", seed=2), "--policy", tmp_path / "p.toml")
    done = mbridge(*words, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    has_table = json.loads((tmp_path / "out.json").read_text())["comparison"] is not None
    assert has_table is (metric == "tflops_per_gpu")
    assert mbridge(*words, "--csv", tmp_path / "out.csv").returncode == (0 if has_table else 2)
    assert (tmp_path / "out.csv").exists() is has_table


def died(point: dict[str, Any]) -> None:
    if point["iteration"] == 2:
        point |= {"verdict": "failed", "reasons": ["20 of 50 steps are in the log; the first missing is 21"]}


def other_gpu(point: dict[str, Any]) -> None:
    point["comparability"] = comparability("NVIDIA H100")


def other_formula(point: dict[str, Any]) -> None:
    point["metrics"]["flops_formula"] = "megatron-bridge/old"


def no_tflops(point: dict[str, Any]) -> None:
    for step in point["steps"]:
        step["tflops_per_gpu"] = None


def same_times(point: dict[str, Any]) -> None:
    for step in point["steps"]:
        step["step_time_s"] = 1.0


def nan_loss(point: dict[str, Any]) -> None:
    """A report whose judge was fooled: the verdict is success, and the losses are not numbers."""
    for step in point["steps"][10:]:
        step["loss"] = "nan"


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (died, "not run", "20 of 50 steps are in the log"),
        (nan_loss, "not run", "the loss is nan at step 11"),
        (no_tflops, "not run", "5 of 5 runs have not measured it"),
        (other_gpu, "not comparable", "device: 'NVIDIA GB200' there, 'NVIDIA H100' here"),
        (other_formula, "not comparable", "'megatron-bridge/new' there, by 'megatron-bridge/old' here"),
        (same_times, "inconclusive", "to the last digit"),
    ],
)
def test_trouble_is_no_pass(change: Any, verdict: str, words: str, compare: Any, tmp_path: Path) -> None:
    done, found = compare(make_report(tmp_path / "b.json", seed=2, change=change))
    assert found["verdict"] == verdict
    assert words in json.dumps(found)
    assert words.split()[0] in done.stdout


def test_one_run_is_no_pass(compare: Any, tmp_path: Path) -> None:
    _, found = compare(make_report(tmp_path / "b.json", runs=1, seed=2))
    assert found["verdict"] == "inconclusive"
    assert "only one run" in json.dumps(found)


def test_hostile_names_come_out_as_text_everywhere(compare: Any, tmp_path: Path) -> None:
    files = ("--markdown", tmp_path / "g.md", "--junit", tmp_path / "g.xml", "--csv", tmp_path / "g.csv")
    done, found = compare(make_report(tmp_path / "b.json", seed=2, label=HOSTILE), *files, label=HOSTILE)
    assert found["points"][0]["point"] == f"t/{HOSTILE}"
    suite = ET.parse(tmp_path / "g.xml").getroot().find("testsuite")
    assert suite is not None
    assert suite.get("name") == f"t/{HOSTILE}"
    assert "<script" not in (tmp_path / "g.md").read_text(encoding="utf-8")
    assert "Traceback" not in done.stderr


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


def test_exit_codes_of_the_gate(mbridge: Any, tmp_path: Path, policy: Path) -> None:
    promoted = mbridge(
        *("baseline", "promote", make_report(tmp_path / "a.json"), "--baseline", tmp_path / "baseline.toml"),
        *("--reason", "the first five runs", "--by", "test", "--yes"),
    )
    assert promoted.returncode == 0, promoted.stdout + promoted.stderr
    cases = (
        ({"level": 1.0}, 0),
        ({"level": 0.9}, 0),
        ({"level": 1.08}, 10),
        ({"change": died}, 11),
        ({"change": other_gpu}, 12),
        ({"runs": 1}, 13),
    )
    for i, (options, code) in enumerate(cases):
        result = make_report(tmp_path / f"b{i}.json", **{"seed": 2, **options})
        assert mbridge("gate", result, "--policy", policy).returncode == code, options


def test_several_reports_are_judged_together(mbridge: Any, tmp_path: Path, policy: Path) -> None:
    mbridge(
        *("baseline", "promote", make_report(tmp_path / "a.json"), "--baseline", tmp_path / "baseline.toml"),
        *("--reason", "the first five runs", "--by", "test", "--yes"),
    )
    nightly = [make_report(tmp_path / f"n{i}.json", runs=1, seed=10 + i) for i in range(5)]
    assert mbridge("gate", nightly[0], "--policy", policy).returncode == 13
    assert mbridge("gate", *nightly, "--policy", policy).returncode == 0


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_a_bad_report_is_one_line(
    mbridge: Any, tmp_path: Path, policy: Path, sentence: Sentence, text: str | None
) -> None:
    result = tmp_path / "b.json"
    if text is not None:
        result.write_text(text)
    (tmp_path / "baseline.toml").write_text("")
    done = mbridge("gate", result, "--policy", policy)
    assert done.returncode == 2
    sentence(done.stderr)
    assert done.stderr.count("\n") == 1


def test_a_missing_baseline_and_an_empty_history_are_no_pass(
    mbridge: Any, tmp_path: Path, policy: Path, sentence: Sentence
) -> None:
    result = make_report(tmp_path / "b.json")
    done = mbridge("gate", result, "--policy", policy)
    assert done.returncode == 2
    sentence(done.stderr)
    promote = shlex.split(done.stderr.partition("with: mbridge ")[2])
    assert promote[2:5] == [str(result), "--baseline", str(tmp_path / "baseline.toml")]
    assert mbridge(*promote, "--yes").returncode == 0
    assert mbridge("gate", make_report(tmp_path / "c.json", seed=2), "--policy", policy).returncode == 0
    policy.write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    old = make_report(tmp_path / "a.json", seed=3, label="other", change=other_gpu)
    old.write_text(old.read_text().replace('"scenario": "nightly"', '"scenario": "another"'))
    assert mbridge("history", "import", old, "--history", tmp_path / "history.sqlite").returncode == 0
    done = mbridge("gate", result, "--policy", policy)
    assert (done.returncode, "has nothing to compare it with" in " ".join(done.stdout.split())) == (12, True)


def test_a_baseline_that_says_that_none_has_been_promoted(mbridge: Any, tmp_path: Path, policy: Path) -> None:
    result, baseline = make_report(tmp_path / "b.json"), tmp_path / "baseline.toml"
    today = datetime.now(UTC).date()

    def gate(days: int, more: str = "") -> Any:
        baseline.write_text(f"version = 1\nnone_until = {today + timedelta(days=days)}\n{more}")
        files = {name: tmp_path / f"gate.{name}" for name in ("markdown", "junit", "html", "json")}
        return mbridge("gate", result, "--policy", policy, *(f"--{name}={file}" for name, file in files.items()))

    done = gate(14)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (17, "", "exit code 17")
    assert done.stdout.splitlines()[0] in (tmp_path / "gate.markdown").read_text()
    (case,) = ET.parse(tmp_path / "gate.junit").iter("testcase")
    assert (case.get("name"), [child.tag for child in case]) == ("(baseline)", ["skipped"])
    assert json.loads((tmp_path / "gate.json").read_text())["error"]["exit_code"] == 17
    assert "<html" in (tmp_path / "gate.html").read_text()
    for days, words in ((-2, "no baseline was promoted until"), (40, "is more than 31 days ahead")):
        done = gate(days)
        assert (done.returncode, words in done.stderr) == (2, True)
    assert "none has been promoted yet" in mbridge("baseline", "check", baseline).stdout
    baseline.write_text("version = 1\npoints = []\n")
    assert mbridge("gate", result, "--policy", policy).returncode == 12

    promote = shlex.split(gate(14).stdout.splitlines()[0].partition("with: mbridge ")[2])
    assert mbridge(*promote, "--yes").returncode == 0
    assert mbridge("gate", make_report(tmp_path / "c.json", seed=2), "--policy", policy).returncode == 0
    baseline.write_text(baseline.read_text().replace("version = 1\n", f"version = 1\nnone_until = {today}\n"))
    both = mbridge("gate", result, "--policy", policy)
    assert (both.returncode, "and there are points; remove it" in both.stderr) == (2, True)


def test_the_noise_that_a_policy_allows(mbridge: Any, tmp_path: Path, policy: Path, sentence: Sentence) -> None:
    result = make_report(tmp_path / "b.json", noise=0.1)
    promote = ("baseline", "promote", result, "--baseline", tmp_path / "n.toml", "--reason", "r", "--policy", policy)
    sentence(mbridge(*promote, "--yes").stderr)
    policy.write_text(POLICY + "max_noise = 0.5\n")
    assert mbridge(*promote, "--max-noise", "0.02", "--yes").returncode == 15
    assert mbridge(*promote, "--yes").returncode == 0


def test_results_that_are_in_the_history_are_not_their_own_reference(
    mbridge: Any, tmp_path: Path, policy: Path
) -> None:
    policy.write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    history = ("--history", tmp_path / "history.sqlite")
    slow = make_report(tmp_path / "b.json", 1.1, seed=2)
    assert mbridge("history", "import", make_report(tmp_path / "a.json"), slow, *history).returncode == 0
    assert mbridge("gate", slow, "--policy", policy).returncode == 10


def test_a_point_that_has_vanished_from_the_result_is_not_run(mbridge: Any, tmp_path: Path, policy: Path) -> None:
    policy.write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    before = make_report(tmp_path / "a.json")
    both = json.loads(before.read_text())
    other = json.loads(make_report(tmp_path / "o.json", seed=5, label="other", change=other_gpu).read_text())
    both["points"] += other["points"]
    before.write_text(json.dumps(both))
    assert mbridge("history", "import", before, "--history", tmp_path / "history.sqlite").returncode == 0
    done = mbridge("gate", make_report(tmp_path / "b.json", seed=2), "--policy", policy, "--json", tmp_path / "g.json")
    verdicts = {p["point"]: p["verdict"] for p in json.loads((tmp_path / "g.json").read_text())["points"]}
    assert (done.returncode, verdicts) == (11, {"t/p": "pass", "t/other": "not run"})


def test_a_confirmation_that_cannot_start_keeps_the_first_verdict(mbridge: Any, tmp_path: Path, policy: Path) -> None:
    old = make_report(tmp_path / "a.json")
    promote = ("baseline", "promote", old, "--baseline", tmp_path / "baseline.toml", "--reason", "the first five runs")
    assert mbridge(*promote, "--by", "test", "--yes").returncode == 0
    no_reference = make_report(tmp_path / "b.json", runs=1, seed=2)
    done = mbridge("gate", no_reference, "--policy", policy, "--confirm", "2", "--json", tmp_path / "g.json")
    assert done.returncode == 13, done.stderr
    found = json.loads((tmp_path / "g.json").read_text())
    assert any("were not run again" in note for note in found["notes"])


def test_side_a_of_two_kinds_is_not_mixed(mbridge: Any, tmp_path: Path) -> None:
    def two_gpus(point: dict[str, Any]) -> None:
        if point["iteration"] > 2:
            other_gpu(point)

    mixed = make_report(tmp_path / "a.json", change=two_gpus)
    done = mbridge("compare", mixed, make_report(tmp_path / "b.json", seed=2), "--json", tmp_path / "g.json")
    (point, *others) = json.loads((tmp_path / "g.json").read_text())["points"]
    assert done.returncode == 0
    assert point["metrics"][0]["num_baseline_runs"] == 3
    assert [other["verdict"] for other in others] == ["not run"]


@every(
    "growth, words",
    [
        pytest.param(lambda night: 1.0015**night, "t/tp=1: step_time_s drifts by +", id="a drift"),
        pytest.param(lambda night: 1 + 0.012 * (night // 22), "step_time_s rose by +", id="stairs"),
        pytest.param(lambda night: 1.0, "", id="steady"),
        pytest.param(lambda night: 0.9985**night, "", id="faster"),
        pytest.param(lambda night: 1.0 + 0.02 * (night >= 30), "", id="one step, which a gate saw"),
    ],
)
def test_a_slow_drift_is_noted_though_every_night_passes(
    mbridge: Any, tmp_path: Path, growth: Callable[[int], float], words: str
) -> None:
    """The level as a function of the night: against the last runs each night passes."""
    random_, points = random.Random(5), []
    for night in range(61):
        points += [
            make_point(growth(night) * random_.gauss(1, 0.002), number=3 * night + i, run_id=f"{night}-{i}")
            for i in range(3)
        ]
    policy, history = tmp_path / "policy.toml", tmp_path / "history.sqlite"
    policy.write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    before = write_report(tmp_path / "before.json", points[:-3])
    assert mbridge("history", "import", before, "--history", history).returncode == 0
    done = mbridge("gate", write_report(tmp_path / "tonight.json", points[-3:]), "--policy", policy)
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [line for line in done.stdout.splitlines() if "mbridge history trend" in line]
    assert len(notes) == bool(words), done.stdout
    assert words in "".join(notes)


@pytest.fixture
def history(mbridge: Any, tmp_path: Path, policy: Path) -> Path:
    """Have the policy compare with five good runs; return the report of five slow ones."""
    policy.write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    old = make_report(tmp_path / "a.json")
    assert mbridge("history", "import", old, "--history", tmp_path / "history.sqlite").returncode == 0
    return make_report(tmp_path / "slow.json", 1.1, seed=2)


@pytest.mark.parametrize("option", ["--json", "--markdown", "--junit", "--html"])
@pytest.mark.parametrize("place", ["missing/x", "", "a.json/x"])
def test_a_file_that_cannot_be_written_is_told_of_first(
    mbridge: Any, tmp_path: Path, policy: Path, history: Path, sentence: Sentence, option: str, place: str
) -> None:
    done = mbridge("gate", history, "--policy", policy, option, tmp_path / place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / place}: ")
    sentence(done.stderr)


def test_what_is_not_a_file_is_not_replaced(mbridge: Any, tmp_path: Path, history: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert mbridge("compare", history, history, "--json", tmp_path / "fifo").returncode == 2
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize(("level", "code"), [(1.1, 10), (1.0, 2)])
def test_a_page_that_cannot_be_drawn_leaves_the_verdict(
    tmp_path: Path,
    policy: Path,
    history: Path,
    sentence: Sentence,
    level: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloudai_mbridge.report.html.page_data", lambda *_: {}["part"])
    result = make_report(tmp_path / "b.json", level, seed=3)
    words = ["gate", result, "--policy", policy, "--html", tmp_path / "b.html", "--json", tmp_path / "g.json"]
    done = CliRunner().invoke(cli, list(map(str, words)), standalone_mode=False)
    assert done.return_value == code
    assert done.stdout.splitlines()[-1] == f"exit code {code}"
    sentence(done.stderr)
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "g.json").read_text())["exit_code"] in (0, 10)
    assert not (tmp_path / "b.html").exists()
