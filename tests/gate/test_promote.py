"""Which runs become a baseline, which do not and why, and what a promotion may make worse."""

import math
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy, MetricPolicy
from cloudai_mbridge.gate.promotion import Proposal, Terms, difference, propose, select
from cloudai_mbridge.gate.runs import RunResult
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.report.model import comparability_id
from tests.cases import every
from tests.gate.some_runs import run_of
from tests.golden import Sentence

TERMS = Terms(by="Ada", at="2026-11-21T12:00:00+00:00", reason="the first one")
FIELDS: Mapping[str, Any] = {"device": "CPU", "tp": 2, "axes": [1, 2.5], "driver": None}


def _run(i: int, factor: float = 1.0, point: str = "sweep/tp2", **changes: Any) -> RunResult:
    """Return a good run whose steps take `factor` x 0.1 s, with noise of their own."""
    dice = random.Random(f"{point} {i}")
    steps = tuple(
        StepRecord(n, 0.1 * factor * math.exp(dice.gauss(0, 0.002)), 50 / factor, 6.0 - 0.01 * n, None, 1.5)
        for n in range(1, 16)
    )
    steps = tuple(replace(step, tflops_per_gpu=5 / (step.step_time_s or 1)) for step in steps)
    facts = {
        "point": point,
        "iteration": i,
        "comparability": FIELDS,
        "warmup_steps": 3,
        "tokens_per_step_per_gpu": 4096.0,
        "nodes": (f"n{i}",),
        "ended_at": f"2026-11-1{i}T10:00:00+00:00",
        "environment": {"device": "CPU", "python": "3.11.2", "nodes": [f"n{i}"], "packages": {"torch": "2.6"}},
        "source": "r/report.json",
        **changes,
    }
    key = {"comparability_id": comparability_id(facts["comparability"])}
    return run_of(f"{point}-{i}-{factor}", steps, **{**key, **facts})


def _runs(noise: float = 0.01, level: float = 1.0, n: int = 5, point: str = "sweep/tp2") -> list[RunResult]:
    """Return runs whose relative standard deviation is about `noise`."""
    spots = [(-1.2, -0.5, 0.1, 0.6, 1.0)[i % 5] for i in range(n)]
    return [_run(i, level * (1 + noise * spot), point) for i, spot in enumerate(spots)]


def _propose(path: Path, runs: list[RunResult], terms: Terms = TERMS) -> Proposal:
    return propose(path, select(runs, ()), terms)


def _promoted(path: Path, runs: list[RunResult], terms: Terms = TERMS) -> Proposal:
    proposal = _propose(path, runs, terms)
    assert proposal.refusals == {}
    path.write_bytes(proposal.new)
    return proposal


def _reasons(path: Path, runs: list[RunResult], terms: Terms = TERMS) -> str:
    (reasons,) = _propose(path, runs, terms).refusals.values()
    return "\n".join(reasons)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "b.toml"


def test_five_runs_with_one_percent_of_noise_are_promoted(path: Path) -> None:
    proposal = _promoted(path, _runs(0.01))
    (point,) = load_baseline(path).points
    assert (point.promoted_by, point.promoted_at, point.reason) == ("Ada", TERMS.at, "the first one")
    time = point.metric("step_time_s")
    assert time
    assert time.value == pytest.approx(0.1, rel=0.005)
    assert time.noise == pytest.approx(0.009, rel=0.1)
    assert (time.n, time.unit, str(time.direction)) == (5, "s", "lower")
    assert time.bounds
    assert (time.bounds.lower, time.bounds.upper) == (-0.03, 0.03)
    assert point.metric("tokens_per_s_per_gpu")
    assert point.comparability == FIELDS
    assert point.environment == {"device": "CPU", "python": "3.11.2", "packages": {"torch": "2.6"}}
    assert proposal.points == ("sweep/tp2",)
    assert [metric.noise for metric in point.metrics if metric.name in ("loss_curve", "peak_memory_gib")] == [0.0, 0.0]


def test_references_are_what_was_measured(path: Path) -> None:
    runs = _runs()
    _promoted(path, runs)
    (reference,) = load_baseline(path).references()
    assert reference.comparability_id == runs[0].comparability_id
    assert reference.comparability == FIELDS
    assert [run.run_id for run in reference.runs] == [run.run_id for run in runs]
    assert [run.nodes for run in reference.runs] == [run.nodes for run in runs]
    assert len(reference.runs[0].values["loss_curve"]) == 10
    assert len(reference.runs[0].values["step_time_s"]) == 1
    assert reference.bounds["loss_curve"] == (-0.02, 0.02)
    assert reference.flops_per_step == 1e12


@pytest.mark.parametrize(("level", "verdict"), [(1.002, "pass"), (1.05, "regression"), (0.9, "improvement")])
def test_a_gate_judges_against_it(path: Path, level: float, verdict: str) -> None:
    _promoted(path, _runs(0.005))
    results = _runs(0.005, level)
    policy, references = GatePolicy(name="p"), load_baseline(path).references()
    assert judge_results(policy, references, results, where="b.toml", today=date(2026, 11, 22)).verdict == verdict


Spoil = Callable[[list[RunResult]], list[RunResult]]


def _last(**changes: Any) -> Spoil:
    return lambda runs: [*runs[:-1], replace(runs[-1], **changes)]


def _last_steps(change: Callable[[StepRecord], StepRecord]) -> Spoil:
    return lambda runs: [*runs[:-1], replace(runs[-1], steps=tuple(map(change, runs[-1].steps)))]


def _all_steps(change: Callable[[StepRecord], StepRecord]) -> Spoil:
    return lambda runs: [replace(run, steps=tuple(map(change, run.steps))) for run in runs]


def _rounded(run: RunResult) -> RunResult:
    return replace(run, steps=tuple(replace(step, step_time_s=round(step.step_time_s or 0, 3)) for step in run.steps))


@every(
    ("spoil", "words"),
    [
        (
            _last(verdict="failed", reasons=("died at step 20",)),
            "run 4 of r/report.json is not a good run: died at step 20",
        ),
        (_last(verdict="skipped"), "is not a good run: skipped"),
        (
            lambda runs: [*runs[:-1], replace(runs[-1], steps=runs[-1].steps[:12])],
            "run 4 of r/report.json is not a good run: 12 of 15 steps are in the log; the first missing is 13",
        ),
        (
            _last_steps(lambda s: replace(s, loss=math.nan) if s.step > 9 else s),
            "is not a good run: the loss is nan at step 10",
        ),
        (
            _last_steps(lambda s: replace(s, loss=math.inf) if s.step == 2 else s),
            "is not a good run: the loss is inf at step 2",
        ),
        (_last(warmup_steps=11), "is not a good run: 4 steps after the warm-up of 11; 5 are needed"),
        (_last(num_steps=None), "is not a good run: the requested number of steps is unknown"),
        (lambda runs: runs[:4], "it has 4 of the 5 runs that are needed"),
        (lambda runs: [*runs, runs[0]], "is the same as run 0 of r/report.json; give each run once"),
        (lambda runs: [*runs, replace(runs[0], run_id="new")], "has the same step times as run 0"),
        (
            lambda runs: [replace(_rounded(runs[0]), run_id="new", num_steps=15), *map(_rounded, runs)],
            "has the same step times as run 0 of r/report.json: a copy, or rounded",
        ),
        (_last(comparability_id="", comparability={}), "its comparability fields are missing"),
        (_last(comparability_id="0" * 16), "its comparability id is not the digest of its fields"),
        (
            lambda runs: [*runs, _run(7, comparability={**FIELDS, "tp": 4})],
            "is of another kind than run 0 of r/report.json: tp 2 -> 4",
        ),
        (lambda runs: _runs(0.1), "step_time_s varies by 8.8% between runs (0.08"),
        (_last(flops_formula="other/1"), "counts 1000000000000.0 FLOPs by 'other/1'"),
        (_last(flops_per_step=math.nan), "counts nan FLOPs per step"),
        (_last_steps(lambda s: replace(s, loss=None)), "1 of 5 runs have not measured loss_curve: run 4"),
        (_last_steps(lambda s: replace(s, peak_memory_gib=None)), "1 of 5 runs have not measured peak_memory_gib"),
        (_all_steps(lambda s: replace(s, step_time_s=None)), "no run has measured step_time_s"),
        (_last_steps(lambda s: replace(s, step_time_s=0.0)), "1 of 5 runs have not measured step_time_s"),
        (_all_steps(lambda s: replace(s, loss=-1.0)), "loss_curve is not a finite number above zero"),
        (
            lambda runs: [replace(run, tokens_per_step_per_gpu=math.inf) for run in runs],
            "tokens_per_s_per_gpu is not a finite number above zero",
        ),
        (
            lambda runs: [
                replace(run, steps=tuple(replace(s, step_time_s=0.1 if s.step > 3 else 0.2 + i) for s in run.steps))
                for i, run in enumerate(runs)
            ],
            "to the last digit in every run, as copied or rounded numbers are",
        ),
        (
            lambda runs: [
                replace(run, steps=tuple(replace(s, tflops_per_gpu=5.0 if i else None) for s in run.steps))
                for i, run in enumerate(runs)
            ],
            "1 of 5 runs have not measured tflops_per_gpu: run 0",
        ),
    ],
)
def test_what_is_refused(path: Path, spoil: Spoil, words: str) -> None:
    assert words in _reasons(path, spoil(_runs()))


def test_one_refused_point_refuses_all_unless_left_out(path: Path) -> None:
    runs = [*_runs(), *_runs(0.1, point="sweep/tp4")]
    proposal = _propose(path, runs)
    assert list(proposal.refusals) == ["sweep/tp4"]
    assert proposal.points == ("sweep/tp2", "sweep/tp4")
    assert not propose(path, select(runs, ["*/tp2"]), TERMS).refusals


def test_points_are_selected_by_pattern_or_by_their_very_name(sentence: Sentence) -> None:
    runs = [_run(1, point="a/[1]"), _run(1, point="a/1"), _run(1, point="b/1")]
    assert list(select(runs, ["a/[1]"])) == ["a/[1]", "a/1"]
    assert list(select(runs, ["b/*", "a/[[]*"])) == ["a/[1]", "b/1"]
    with pytest.raises(BadInput, match="'c':") as caught:
        select(runs, ["b/*", "c"])
    sentence(caught)
    with pytest.raises(BadInput) as caught:
        select([], [])
    sentence(caught)


def test_other_points_stay_as_they_are_to_the_byte(path: Path) -> None:
    _promoted(path, [*_runs(), *_runs(point="zoo/1"), *_runs(point="a/1")])
    before = path.read_bytes()
    later = replace(TERMS, at="2026-12-01T00:00:00+00:00", reason="again")
    proposal = _promoted(path, _runs(), later)
    changed = [line for line in difference(proposal) if line.startswith(("+", "-"))][2:]
    assert changed == [
        '-promoted_at = "2026-11-21T12:00:00+00:00"',
        '-reason = "the first one"',
        '+promoted_at = "2026-12-01T00:00:00+00:00"',
        '+reason = "again"',
    ]
    assert _propose(path, _runs()).new == before
    assert [point.point for point in load_baseline(path).points] == ["a/1", "sweep/tp2", "zoo/1"]


def test_the_order_of_runs_does_not_matter(path: Path) -> None:
    runs = _runs()
    assert _propose(path, runs).new == _propose(path, runs[::-1]).new


def test_a_slower_baseline_is_refused_unless_accepted(path: Path) -> None:
    _promoted(path, _runs())
    slower = _runs(level=1.05)
    words = _reasons(path, slower)
    assert "step_time_s is worse by +5.00% than the baseline, beyond the margin of 1.00%; --accept-regression" in words
    assert "tflops" not in words
    _promoted(path, slower, replace(TERMS, accept_regression=True, reason="new driver, ticket 7"))
    (point,) = load_baseline(path).points
    assert point.reason == "new driver, ticket 7"
    assert point.accepted[0].startswith("step_time_s is worse by +5.00%")
    for level in (1.05, 1.058, 0.9):  # the same, slightly slower, faster
        _promoted(path, _runs(level=level))
    assert load_baseline(path).points[0].accepted == []


def test_many_small_steps_for_the_worse_are_noticed(path: Path) -> None:
    for i in range(4):
        _promoted(path, _runs(level=1.009**i))
    assert "step_time_s has drifted by +3.65% from the best baseline" in _reasons(path, _runs(level=1.009**4))
    _promoted(path, _runs(level=1.009**4), replace(TERMS, accept_regression=True))
    _promoted(path, _runs(level=1.009**5))


def test_a_loss_that_changes_either_way_and_a_metric_that_is_gone_are_refused(path: Path) -> None:
    _promoted(path, _runs())
    gone = _all_steps(lambda s: replace(s, peak_memory_gib=None))(_runs())
    assert "peak_memory_gib was measured, and is not any more" in _reasons(path, gone)
    for factor in (0.99, 1.01):
        runs = _all_steps(lambda s, f=factor: replace(s, loss=(s.loss or 0) * f))(_runs())  # type: ignore[misc]
        assert f"loss_curve is worse by {factor - 1:+.2%}" in _reasons(path, runs)


def test_margins_are_the_policys(path: Path) -> None:
    _promoted(path, _runs())
    strict = [MetricPolicy(name="step_time_s", margin=0.001, tolerance=0.002)]
    assert "beyond the margin of 0.10%" in _reasons(path, _runs(level=1.005), replace(TERMS, metrics=strict))
    _promoted(path, _runs(), replace(TERMS, metrics=strict))
    (point,) = load_baseline(path).points
    assert [m.name for m in point.metrics if m.bounds] == ["step_time_s"]


def test_what_the_policy_does_not_name_has_the_built_in_margins(path: Path) -> None:
    _promoted(path, _runs())
    terms = replace(TERMS, metrics=[MetricPolicy(name="step_time_s")])
    runs = _all_steps(lambda s: replace(s, peak_memory_gib=(s.peak_memory_gib or 0) * 1.5))(_runs())
    assert "peak_memory_gib is worse by +50.00%" in _reasons(path, runs, terms)
    runs = _all_steps(lambda s: replace(s, loss=(s.loss or 0) * 1.5))(_runs())
    assert "loss_curve is worse by +50.00%" in _reasons(path, runs, terms)
    terms = replace(TERMS, metrics=[MetricPolicy(name="loss_curve")])
    words = _reasons(path, _runs(level=1.05), terms)
    assert "step_time_s is worse by +5.00%" in words
    assert "tokens" not in words


def test_tflops_of_another_formula_are_not_compared(path: Path) -> None:
    _promoted(path, _runs())
    other = _all_steps(lambda s: replace(s, tflops_per_gpu=(s.tflops_per_gpu or 0) / 2))(_runs())
    terms = replace(TERMS, metrics=[MetricPolicy(name="tflops_per_gpu")])
    assert "tflops_per_gpu is worse by -50.00%" in _reasons(path, other, terms)
    _promoted(path, [replace(run, flops_formula="megatron-bridge/next") for run in other], terms)


def test_a_renamed_point_is_compared_with_what_it_was(path: Path) -> None:
    _promoted(path, _runs())
    renamed = [replace(run, point="new/name") for run in _runs(level=1.5)]
    words = _reasons(path, renamed, replace(TERMS, accept_change=True))
    assert "step_time_s is worse by +50.00%" in words
    words = _reasons(path, renamed, replace(TERMS, accept_regression=True))
    assert "is the work of the baseline's 'sweep/tp2' under another name; --accept-change" in words
    _promoted(path, [replace(run, point="new/name") for run in _runs(level=1.008)], replace(TERMS, accept_change=True))
    (point,) = load_baseline(path).points
    time = point.metric("step_time_s")
    assert time
    assert (point.point, time.anchor) == ("new/name", pytest.approx(0.1, rel=0.005))
    assert point.accepted == ["is the work of the baseline's 'sweep/tp2' under another name"]


def test_the_same_work_twice_stays_there_twice(path: Path) -> None:
    _promoted(path, _runs())
    both = [*_runs(), *_runs(point="new/name")]
    assert "under another name" in _reasons(path, both)
    _promoted(path, both, replace(TERMS, accept_change=True))
    assert [point.point for point in load_baseline(path).points] == ["new/name", "sweep/tp2"]
    _promoted(path, both)
    two = [*_runs(point="two"), *_runs(point="three")]
    _promoted(path, two, replace(TERMS, accept_change=True))
    assert [point.point for point in load_baseline(path).points] == ["sweep/tp2", "three", "two"]


def test_names_that_were_swapped_are_compared_by_their_work(path: Path, sentence: Sentence) -> None:
    def two(first: str, second: str, level: float = 1.0) -> list[RunResult]:
        other = [_run(i, 2 * level + i / 100, second, comparability={**FIELDS, "tp": 4}) for i in range(5)]
        return [*_runs(point=first), *other]

    _promoted(path, two("a", "b"))
    terms = replace(TERMS, accept_change=True)
    ((point, reasons),) = _propose(path, two("b", "a", 1.1), terms).refusals.items()
    assert point == "a"
    assert "step_time_s" in reasons[0]
    sentence(reasons[0])
    _promoted(path, two("b", "a"), terms)
    assert [point.comparability["tp"] for point in load_baseline(path).points] == [4, 2]


def test_limits_may_be_moved_and_laxer_ones_are_noted(path: Path) -> None:
    few = _propose(path, _runs(n=3), replace(TERMS, min_runs=3))
    assert (few.refusals, few.notes) == ({}, ("--min-runs 3: the rule is 5; with fewer, the noise is hardly known",))
    noisy = _propose(path, _runs(0.1), replace(TERMS, max_noise=0.2))
    assert (noisy.refusals, noisy.notes) == ({}, ("--max-noise 0.2: the rule is 0.02; with more, less is detected",))
    assert _propose(path, _runs(), replace(TERMS, min_runs=5, max_noise=0.01)).notes == ()
    assert "6 runs" in _reasons(path, _runs(), replace(TERMS, min_runs=6))


def test_runs_of_one_day_or_of_the_same_nodes_are_noted(path: Path) -> None:
    proposal = _propose(path, [replace(run, nodes=("n1",)) for run in _runs()])
    assert proposal.notes == ("sweep/tp2: all runs are of the same nodes, so the noise between nodes is not in it",)
    ends = [f"2026-11-21T{10 + i}:00:00+00:00" for i in range(4)]
    for last, is_noted in (("2026-11-22T09:00:00", True), ("2026-11-22T12:00:00+01:00", False)):
        runs = [replace(run, ended_at=end) for run, end in zip(_runs(), [*ends, last], strict=True)]
        noted = ("sweep/tp2: all runs ended within a day, so the noise between days is not in it",)
        assert _propose(path, runs).notes == (noted if is_noted else ())


def test_other_work_under_the_same_name_is_refused_unless_accepted(path: Path) -> None:
    _promoted(path, _runs())
    other = [
        _run(i, run.steps[0].step or 1.0, comparability={**FIELDS, "device": "H200"}) for i, run in enumerate(_runs())
    ]
    other = [replace(b, steps=a.steps) for a, b in zip(_runs(level=2.0), other, strict=True)]
    assert "is different work from the baseline's: device 'CPU' -> 'H200'; --accept-change" in _reasons(path, other)
    _promoted(path, other, replace(TERMS, accept_change=True))
    assert "different work" in load_baseline(path).points[0].accepted[0]


def test_tflops_of_another_formula_start_anew(path: Path) -> None:
    _promoted(path, _runs())
    other = [replace(run, flops_formula="megatron-bridge/next") for run in _runs()]
    other = _all_steps(lambda s: replace(s, tflops_per_gpu=(s.tflops_per_gpu or 0) / 2))(other)
    _promoted(path, other)
    metric = load_baseline(path).points[0].metric("tflops_per_gpu")
    assert metric
    assert metric.anchor == metric.value


NASTY = [
    'a/"]\n[[points]]\nx = "',
    "a/<script>",
    "a/😀",
    "a/\u202egnp",
    "a/\x1b[31m",
    "a/\\u0041",
    "a/'''",
    "a/" + "x" * 300,
    " a/b ",
]


@pytest.mark.parametrize("name", NASTY)
def test_hostile_names_come_back_and_cannot_hide(path: Path, name: str) -> None:
    fields = {name: name, "x": [name, None], "": {"a": 1}}
    runs = [replace(run, point=name, run_id=f"{i}{name}", nodes=(name,)) for i, run in enumerate(_runs())]
    runs = [replace(run, comparability=fields, comparability_id=comparability_id(fields)) for run in runs]
    environment = {"device": name, "packages": {name: name}, "repositories": [{"url": name}]}
    runs = [replace(run, environment=environment) for run in runs]
    _promoted(path, runs, replace(TERMS, by=name, reason=name))
    text = path.read_text()
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\n[[points]]\n") == 1
    (point,) = load_baseline(path).points
    assert (point.point, point.comparability, point.environment) == (name, fields, environment)
    assert point.runs[0].nodes == [name]
    assert point.reason == name.strip()


def test_a_lone_surrogate_is_refused(path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"a/.ud800.: point:") as caught:
        _propose(path, [replace(run, point="a/\ud800") for run in _runs()])
    sentence(caught)


def test_environments_are_kept_as_far_as_runs_agree_and_hold_no_login(path: Path) -> None:
    environment = {
        "device": "H200",
        "driver": None,
        "packages": {"torch": "2.6", "x": "1 @ https://me:pw@host/x"},
        "git": {"commit": "abc", "dirty": False, "token": "t"},
        "image": {"name": "user:pw@registry/nemo:25@sha256:00", "digest": None},
        "repositories": [{"url": "https://tok@host/r.git", "commit": "c", "path": "/home/me"}],
        "WANDB_API_KEY": "secret",
    }
    variables = [{"NCCL_DEBUG": "WARN", "NCCL_ALGO": str(i % 2)} for i in range(len(_runs()))]
    runs = [
        replace(run, environment={**environment, "cuda": f"12.{i % 2}", "variables": variables[i]})
        for i, run in enumerate(_runs())
    ]
    proposal = _promoted(path, runs)
    assert load_baseline(path).points[0].environment == {
        "device": "H200",
        "packages": {"torch": "2.6", "x": "1 @ https://host/x"},
        "git": {"commit": "abc", "dirty": False},
        "image": {"name": "registry/nemo:25@sha256:00"},
        "repositories": [{"url": "https://host/r.git", "commit": "c"}],
        "variables": {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "(several values)"},
    }
    assert "the runs differ in cuda, variables.NCCL_ALGO, which is left out" in "".join(proposal.notes)


@pytest.mark.parametrize(
    "environment",
    [{"driver": "a" * 500_000}, {}, {"packages": 3, "git": [], "repositories": ["x"], "device": {"a": 1}}],
)
def test_odd_environments_do_no_harm(path: Path, environment: dict[str, Any]) -> None:
    _promoted(path, [replace(run, environment=environment) for run in _runs()])
    assert load_baseline(path).points[0].environment.get("repositories", [{}]) == [{}]


def test_a_broken_baseline_is_not_written_over(path: Path, sentence: Sentence) -> None:
    path.write_text("version = 1\npoints = 3\n")
    with pytest.raises(BadInput, match=r"points:") as caught:
        _propose(path, _runs())
    sentence(caught)


def test_the_file_is_one_fact_metric_or_run_per_line(path: Path) -> None:
    _promoted(path, _runs())
    lines = path.read_text().split("\n")
    assert sum(line.startswith("  { run_id = ") for line in lines) == 5
    assert sum(line.startswith('  { name = "step_time_s"') for line in lines) == 1
    assert 'driver = { json = "null" }' in lines
    assert tomllib.loads(path.read_text())["points"][0]["comparability"]["axes"] == [1, 2.5]
