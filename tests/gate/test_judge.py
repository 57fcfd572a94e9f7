"""The gate's verdicts: each kind of result, and each kind of trouble."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.gate.runs import RunResult, reference_from_runs
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict, MetricVerdict
from cloudai_mbridge.logs import StepRecord
from tests.cases import every
from tests.gate.some_runs import KEY, NOISE, OTHER, make_run, runs
from tests.golden import Sentence

TODAY = date(2026, 6, 1)
BASELINE = runs("a", NOISE)
POLICY = GatePolicy.model_validate({"name": "p", "baseline": "b.toml"})
FAILED = make_run("b9", verdict="failed", reasons=("out of memory",))
H100 = {"comparability_id": "k2", "comparability": {**KEY, "device": "NVIDIA H100"}}


def judged(results: Sequence[RunResult], baseline: Sequence[RunResult] = BASELINE, **policy: Any) -> GateResult:
    whole = GatePolicy.model_validate({"name": "p", "baseline": "b.toml", **policy})
    references = [reference_from_runs(baseline)] if baseline else []
    return judge_results(whole, references, results, where="baseline b.toml", today=TODAY)


def metric(result: GateResult, name: str = "step_time_s") -> MetricVerdict:
    return next(metric for metric in result.points[0].metrics if metric.metric == name)


def tight(side: str, change: float = 0.0) -> list[RunResult]:
    return runs(side, [n / 100 for n in (NOISE if side == "a" else OTHER)], change)


def loud(side: str, factor: int = 3) -> list[RunResult]:
    return runs(side, [factor * n for n in (NOISE if side == "a" else OTHER)])


def with_steps(results: Sequence[RunResult], change: Callable[[StepRecord], StepRecord]) -> list[RunResult]:
    return [replace(run, steps=tuple(map(change, run.steps))) for run in results]


def of_nine(results: Callable[[int], Sequence[RunResult]]) -> GateResult:
    """Judge nine points. results: of the point with this number."""
    names = [f"test/p{i}" for i in range(9)]
    references = [replace(reference_from_runs(BASELINE), point=n, comparability_id=n) for n in names]
    many = [
        replace(run, point=n, comparability_id=n, run_id=f"{n}{run.run_id}")
        for i, n in enumerate(names)
        for run in results(i)
    ]
    return judge_results(POLICY, references, many, where="b", today=TODAY)


CASES = [
    # runs, baseline, policy, verdict, and what the point or its step time says
    ([make_run("b0", 1.6)], BASELINE, {}, "regression", ""),
    (tight("b", 0.009), tight("a"), {}, "pass", ""),
    (tight("b", 0.012), tight("a"), {}, "regression", ""),
    (loud("b"), loud("a"), {}, "inconclusive", "cannot be ruled out; about"),
    ([make_run("b0")], BASELINE, {}, "inconclusive", "only one run, and the policy requires 3"),
    (runs("b", OTHER), [make_run("a0")], {}, "inconclusive", "the reference has only one run"),
    ([make_run("b0", 1.6)], [make_run("a0")], {}, "inconclusive", "no estimate of the noise"),
    ([make_run("b0", 1.6)], [make_run("a0")], {"assumed_noise": 0.02}, "regression", ""),
    ([make_run("b0", 1.0)], [make_run("a0")], {"assumed_noise": 0.001}, "inconclusive", ""),
    (runs("b", OTHER, change=-0.9), BASELINE, {}, "inconclusive", "too large an improvement to be plausible"),
    ([*runs("b", OTHER), FAILED], BASELINE, {"max_failed_runs": 1}, "pass", ""),
    ([FAILED], BASELINE, {"max_failed_runs": 1}, "not run", "out of memory"),
    ([*runs("b", OTHER, change=0.1), FAILED], BASELINE, {}, "regression", "out of memory"),
    (runs("b", OTHER), [], {}, "not comparable", "baseline b.toml has nothing to compare it with"),
    ([], BASELINE, {}, "not run", "the reference has this point, but the result has no run of it"),
    ([], [], {}, "not run", ""),
    (runs("b", OTHER, num_steps=None), BASELINE, {}, "not run", "the requested number of steps is unknown"),
    (runs("b", OTHER, num_steps=0), BASELINE, {}, "not run", "the requested number of steps is unknown"),
    (runs("b", OTHER, warmup_steps=8), BASELINE, {}, "not run", "4 steps after the warm-up of 8; 5 are needed"),
    (runs("b", OTHER, losses=[(7.0 - 0.1 * i) * (1 + 1e-6) for i in range(12)]), BASELINE, {}, "pass", ""),
    ([*runs("b", OTHER), make_run("b9", 1.2)], BASELINE, {}, "inconclusive", "node-b9"),
    (
        *(runs("b", OTHER, **H100), BASELINE, {}, "not comparable"),
        "differs in device: 'NVIDIA GB200' there, 'NVIDIA H100' here",
    ),
    (
        *([replace(run, steps=run.steps[:6] * 2) for run in runs("b", OTHER)], BASELINE, {}, "not run"),
        "6 of 12 steps are in the log; the first missing is 7",
    ),
]


@every(("results", "baseline", "policy", "verdict", "said"), CASES)
def test_the_verdict_and_its_words(
    results: list[RunResult], baseline: list[RunResult], policy: dict[str, Any], verdict: str, said: str
) -> None:
    result = judged(results, baseline, **policy)
    told = [text for point in result.points for text in (*point.words, *(m.words for m in point.metrics[:1]))]
    codes = {"regression": 10, "not run": 11, "not comparable": 12, "inconclusive": 13, "improvement": 0, "pass": 0}
    assert (result.verdict, result.exit_code) == (verdict, codes[verdict.replace("_", " ")])
    assert said in "; ".join(told)


def test_no_change_passes():
    result = judged(runs("b", OTHER))
    assert (result.verdict, result.exit_code) == (GateVerdict.PASS, 0)
    assert {m.metric for m in result.points[0].metrics} == {
        "step_time_s",
        "step_time_mean_s",
        "tflops_per_gpu",
        "loss_curve",
        "peak_memory_gib",
    }
    assert "within +3.00 %" in metric(result).words


def test_a_slowdown_is_a_regression_with_its_numbers():
    result = judged(runs("b", OTHER, change=0.06))
    found = metric(result)
    assert (result.verdict, result.exit_code) == (GateVerdict.REGRESSION, 10)
    assert found.change == pytest.approx(0.06, abs=0.01)
    assert found.interval is not None
    assert found.interval[0] < found.change < found.interval[1]
    assert "5 runs against 5" in found.words
    assert metric(result, "tflops_per_gpu").verdict is GateVerdict.REGRESSION
    assert metric(result, "tflops_per_gpu").change == pytest.approx(-0.06, abs=0.012)


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 14)])
def test_a_speedup_is_an_improvement(fails, code):
    result = judged(runs("b", OTHER, change=-0.06), fail_on_improvement=fails)
    assert (result.verdict, result.exit_code) == (GateVerdict.IMPROVEMENT, code)


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_times_without_variance_are_suspicious(change):
    same = [replace(make_run(f"b{i}", 1 + change), steps=_rounded(1 + change)) for i in range(5)]
    result = judged(same)
    assert result.verdict is GateVerdict.INCONCLUSIVE
    assert "to the last digit" in metric(result).words


def _rounded(level: float) -> tuple[StepRecord, ...]:
    return tuple(StepRecord(i + 1, round(level, 2), 100.0, 7.0 - 0.1 * i, None, 10.0) for i in range(12))


def test_a_run_given_twice_counts_once(sentence: Sentence):
    copies = [replace(make_run("b0"), run_id=f"b{i}") for i in range(5)]
    for results in (copies, [make_run("b0")] * 5):
        result = judged(results)
        assert result.verdict is GateVerdict.INCONCLUSIVE
        assert metric(result).num_runs == 1
        assert len(result.notes) == 4
        sentence(result.notes[0])


@pytest.mark.parametrize(
    "trouble",
    [
        {"verdict": "failed", "reasons": ("20 of 50 steps are in the log; the first missing is 21",)},
        {"verdict": "failed", "reasons": ("the loss is nan at step 20",)},
        {"verdict": "skipped", "reasons": ("the run before it failed",)},
        {"num_steps": 50},
    ],
    ids=["died", "nan", "skipped", "truncated"],
)
def test_a_run_that_did_not_end_well_is_not_run(trouble):
    for results in ([make_run("b9", **trouble)], [*runs("b", OTHER), make_run("b9", **trouble)]):
        result = judged(results)
        assert (result.verdict, result.exit_code) == (GateVerdict.NOT_RUN, 11)
        why = trouble.get("reasons", ("12 of 50 steps are in the log; the first missing is 13",))[0]
        assert why in result.points[0].words[0]


@pytest.mark.parametrize("name", ["step_time_s", "tflops_per_gpu", "loss_curve", "peak_memory_gib"])
def test_a_metric_that_is_missing_is_not_run(name):
    field = {"loss_curve": "loss"}.get(name, name)
    good = runs("b", OTHER)
    for count in (1, 5):
        result = judged([*with_steps(good[:count], lambda step: replace(step, **{field: None})), *good[count:]])
        assert result.verdict is GateVerdict.NOT_RUN
        assert f"{count} of 5 runs have not measured it" in metric(result, name).words


def test_a_rate_that_neither_side_knows_does_not_keep_a_point_from_passing():
    """As Megatron-Bridge prints 0.0 TFLOP/s for hybrid models."""
    sides = [[_with(run, 0.0) for run in runs(side, noise)] for side, noise in (("b", OTHER), ("a", NOISE))]
    result = judged(*sides)
    assert result.verdict is GateVerdict.PASS
    assert "tflops_per_gpu" not in {m.metric for m in result.points[0].metrics}


def test_what_nobody_measured_is_left_out_if_it_is_optional():
    result = judged(runs("b", OTHER, memory=None), runs("a", NOISE, memory=None))
    assert result.verdict is GateVerdict.PASS
    assert "peak_memory_gib" not in {m.metric for m in result.points[0].metrics}


def test_the_same_work_under_another_name_is_compared():
    result = judged(runs("b", OTHER, point="renamed/point"))
    assert (result.verdict, result.points[0].point) == (GateVerdict.PASS, "renamed/point")
    assert len(result.points) == 1


@pytest.mark.parametrize(
    "change", [{"flops_formula": "megatron-bridge/old"}, {"flops_formula": None}, {"flops_per_step": 2e12}]
)
def test_tflops_by_another_formula_are_not_comparable_but_step_time_is(change):
    result = judged(runs("b", OTHER, **change))
    assert result.verdict is GateVerdict.NOT_COMPARABLE
    assert metric(result).verdict is GateVerdict.PASS
    assert metric(result, "tflops_per_gpu").verdict is GateVerdict.NOT_COMPARABLE
    assert "FLOPs" in metric(result, "tflops_per_gpu").words
    slow = judged(runs("b", OTHER, change=0.1, **change))
    assert slow.verdict is GateVerdict.REGRESSION


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_loss_curve_that_departs_either_way_is_a_regression(factor):
    curve = [(7.0 - 0.1 * i) * (factor if i >= 9 else 1.0) for i in range(12)]
    result = judged(runs("b", OTHER, losses=curve))
    assert result.verdict is GateVerdict.REGRESSION
    assert metric(result, "loss_curve").verdict is GateVerdict.REGRESSION
    assert metric(result).verdict is GateVerdict.PASS


def test_more_memory_is_a_regression():
    result = judged(runs("b", OTHER, memory=11.0))
    assert metric(result, "peak_memory_gib").verdict is GateVerdict.REGRESSION
    assert result.verdict is GateVerdict.REGRESSION


def test_hiccups_that_the_typical_step_does_not_show_are_seen():
    def hiccup(step: StepRecord) -> StepRecord:
        return replace(step, step_time_s=(step.step_time_s or 0) * 4) if step.step in (5, 10) else step

    result = judged(with_steps(runs("b", OTHER), hiccup))
    assert metric(result, "step_time_mean_s").verdict is GateVerdict.REGRESSION


WAIVER = {"point": "test/*", "reason": "known slowdown of the new collective", "by": "anna", "up_to": 0.15}


def test_a_waiver_takes_a_regression_out_until_it_expires(sentence: Sentence):
    waived = judged(runs("b", OTHER, change=0.1), waivers=[{**WAIVER, "until": date(2026, 6, 1)}])
    assert waived.verdict is GateVerdict.PASS
    assert metric(waived).verdict is GateVerdict.REGRESSION
    assert "up to 15% until 2026-06-01 by anna: known slowdown" in metric(waived).waived
    expired = judged(runs("b", OTHER, change=0.1), waivers=[{**WAIVER, "until": date(2026, 5, 31)}])
    assert expired.verdict is GateVerdict.REGRESSION
    sentence(expired.notes[0])


@every(("bounds", "noise"), [((-0.5, 0.001), 1), ((-9.0, 9.0), 6)])
def test_the_tighter_of_the_baselines_bounds_and_the_tolerance_holds(bounds: tuple[float, float], noise: int) -> None:
    reference = replace(reference_from_runs(BASELINE), bounds={"step_time_s": bounds})
    result = judge_results(POLICY, [reference], loud("b", noise), where="b", today=TODAY)
    assert metric(result).verdict is GateVerdict.INCONCLUSIVE


def test_two_looks_share_the_false_alarm_rate():
    slow = runs("b", OTHER, change=0.028)
    p_value = judged(slow).points[0].metrics[0].adjusted_p
    strict, references = POLICY.model_copy(update={"false_alarm_rate": 1.5 * p_value}), [reference_from_runs(BASELINE)]
    for looks, verdict in ((1, GateVerdict.REGRESSION), (2, GateVerdict.INCONCLUSIVE)):
        result = judge_results(strict, references, slow, where="b", today=TODAY, num_judgements=looks)
        assert result.verdict is verdict


def test_variables_that_were_added_or_removed_are_told():
    old = {"variables": {"NCCL_ALGO": "Ring", "A": "1"}, "benchmark": {"commit": "c0ffee"}}
    new = {"variables": {"NCCL_ALGO": "Tree", "B": "2"}, "benchmark": {"commit": "beef"}}
    before = [replace(run, environment=old) for run in BASELINE]
    result = judged(runs("b", OTHER, environment=new), before)
    variables = {"NCCL_ALGO": ("Ring", "Tree"), "A": ("1", "(not set)"), "B": ("(not set)", "2")}
    changes = {f"variables.{name}": pair for name, pair in variables.items()}
    assert result.environment_changes == {**changes, "benchmark.commit": ("c0ffee", "beef")}
    assert list(result.environment_changes)[-1] == "benchmark.commit"
    before = [replace(run, environment={}) for run in BASELINE]
    assert judged(runs("b", OTHER, environment=new), before).environment_changes == {}  # not known


def test_what_changed_in_the_environment_is_told():
    new = {"packages": {"torch": "2.14.0"}, "nodes": ["x"], "driver": "580"}
    result = judged(runs("b", OTHER, environment=new))
    assert result.environment_changes == {"packages.torch": ("2.13.0", "2.14.0")}


def test_a_waiver_does_not_cover_more_than_its_size_nor_doubts() -> None:
    waivers = [{**WAIVER, "until": date(2026, 6, 1)}]
    more = judged(runs("b", OTHER, change=0.3), waivers=waivers)
    assert more.verdict is GateVerdict.REGRESSION
    assert "beyond the 15% that anna has waived" in metric(more).words
    assert judged([make_run("b0")], waivers=waivers).verdict is GateVerdict.INCONCLUSIVE
    assert judged([FAILED], waivers=waivers).verdict is GateVerdict.NOT_RUN


def test_the_runs_of_the_reference_are_not_compared_with_themselves(sentence: Sentence) -> None:
    result = judged(BASELINE)
    assert result.verdict is GateVerdict.NOT_RUN
    sentence(result.notes[0])


@pytest.mark.parametrize("first", [True, False])
def test_of_two_judgements_of_a_run_the_worse_counts(first: bool) -> None:
    good = runs("b", OTHER)
    failed = replace(good[0], verdict="failed", reasons=("out of memory",))
    assert judged([failed, *good] if first else [*good, failed]).verdict is GateVerdict.NOT_RUN


@pytest.mark.parametrize("change", [{"flops_formula": "megatron-bridge/old"}, {"flops_per_step": 2e12}])
def test_one_run_by_another_formula_is_enough(change: dict[str, Any]) -> None:
    mixed = runs("b", OTHER)
    mixed[3] = replace(mixed[3], **change)
    assert judged(mixed).verdict is GateVerdict.NOT_COMPARABLE
    assert (
        judged(runs("b", OTHER), [*BASELINE[:4], replace(BASELINE[4], **change)]).verdict is GateVerdict.NOT_COMPARABLE
    )


def test_rounded_copies_count_once() -> None:
    def rounded(run: RunResult, name: str) -> RunResult:
        steps = tuple(replace(s, step_time_s=round(1 + (s.step * 7 % 11) / 100, 2)) for s in run.steps)
        return replace(run, steps=steps, run_id=name)

    result = judged([rounded(make_run("b"), f"b{i}") for i in range(5)])
    assert metric(result).num_runs == 1


def test_one_run_says_nothing_of_memory_and_loss() -> None:
    result = judged([make_run("b0", memory=10.4, losses=[7.05 - 0.1 * i for i in range(12)])])
    assert result.verdict is GateVerdict.INCONCLUSIVE
    assert metric(result, "peak_memory_gib").verdict is GateVerdict.INCONCLUSIVE
    assert metric(result, "loss_curve").verdict is GateVerdict.INCONCLUSIVE


def test_doubts_about_an_optional_metric_decide_if_its_value_itself_is_beyond_the_bounds() -> None:
    good = runs("b", OTHER)
    first = with_steps(good[:1], lambda step: replace(step, step_time_s=20.0) if step.step == 7 else step)
    result = judged([*first, *good[1:]])
    assert metric(result, "step_time_mean_s").verdict is GateVerdict.INCONCLUSIVE
    assert result.verdict is GateVerdict.INCONCLUSIVE


def test_the_words_of_a_curve_are_about_the_place_that_decides() -> None:
    def with_curve(run: RunResult, first: float, last: float) -> RunResult:
        losses = [7.0 * first, *(7.0 - 0.1 * i for i in range(1, 10)), 6.0 * last, 5.9 * last]
        steps = tuple(replace(s, loss=loss) for s, loss in zip(run.steps, losses, strict=True))
        return replace(run, steps=steps)

    noisy = (1.2, 0.9, 1.1, 0.95, 1.25)
    old = [with_curve(run, n, 1.0) for run, n in zip(BASELINE, noisy, strict=True)]
    new = [with_curve(run, n, 1.015) for run, n in zip(runs("b", OTHER), reversed(noisy), strict=True)]
    found = metric(judged(new, old), "loss_curve")
    assert found.verdict is GateVerdict.REGRESSION
    assert found.words.startswith("in stretch 9 of 10: +1.50 %")


def test_many_points_share_one_false_alarm_rate() -> None:
    """What is significant alone is not among nine; the words of the one that regressed are the same."""
    results = runs("b", OTHER, change=0.022)
    alone, together = judged(results), of_nine(lambda i: runs("b", OTHER) if i else results)
    assert alone.verdict is GateVerdict.REGRESSION
    assert metric(together).p_value == metric(alone).p_value
    assert metric(together).adjusted_p > metric(alone).adjusted_p
    assert together.points[0].verdict is GateVerdict.INCONCLUSIVE


def test_the_detectable_change_knows_the_margin_and_all_the_points() -> None:
    assert metric(judged(tight("b"), tight("a"))).detectable > 0.01
    one = metric(judged(runs("b", OTHER))).detectable
    assert metric(of_nine(lambda i: runs("b", OTHER))).detectable > 1.2 * one


def test_a_rate_that_falls_is_told_with_its_sign() -> None:
    policy = {"metrics": [{"name": "tokens_per_s_per_gpu"}]}
    found = metric(judged(runs("b", OTHER, change=0.08), **policy), "tokens_per_s_per_gpu")
    assert found.verdict is GateVerdict.REGRESSION
    assert "beyond the margin of -1.00 %" in found.words
    assert found.detectable < 0


@pytest.mark.parametrize(("required", "overall"), [(True, GateVerdict.NOT_RUN), (False, GateVerdict.PASS)])
def test_tflops_that_contradict_the_step_time(required: bool, overall: GateVerdict) -> None:
    metrics = [{"name": "step_time_s"}, {"name": "tflops_per_gpu", "follows": "step_time_s", "required": required}]
    result = judged([_with(run, 0.5) for run in runs("b", OTHER)], metrics=metrics)
    tflops = metric(result, "tflops_per_gpu")
    assert tflops.verdict is GateVerdict.NOT_RUN
    assert "contradicts step_time_s: the work of a step, their product, changed by -50.0%" in tflops.words
    assert result.verdict is overall


FOLLOWED = [{"name": "step_time_s"}, {"name": "tflops_per_gpu", "follows": "step_time_s", "required": True}]


def _with(run: RunResult, rate: float, digits: tuple[int, int] | None = None) -> RunResult:
    """Return a run at other rates; digits: of its times and rates, as Megatron-Bridge's lines have them."""
    steps = [replace(step, tflops_per_gpu=(step.tflops_per_gpu or 0) * rate) for step in run.steps]
    if digits is not None:
        rounded = [
            (round(step.step_time_s or 0, digits[0]), round(step.tflops_per_gpu or 0, digits[1])) for step in steps
        ]
        steps = [replace(s, step_time_s=t, tflops_per_gpu=r) for s, (t, r) in zip(steps, rounded, strict=True)]
    return replace(run, steps=tuple(steps))


@pytest.mark.parametrize("level", [0.02, 0.1, 1.0, 50.0])
@pytest.mark.parametrize(("rate", "verdict"), [(1.0, "pass"), (0.9, "not run"), (1.1, "not run")])
def test_the_rate_of_short_steps_is_looked_at_as_closely(level: float, rate: float, verdict: str) -> None:
    baseline = [make_run(f"a{i}", level * (1 + n)) for i, n in enumerate(NOISE)]
    results = [_with(make_run(f"b{i}", level * (1 + n)), rate) for i, n in enumerate(OTHER)]
    assert metric(judged(results, baseline, metrics=FOLLOWED), "tflops_per_gpu").verdict == verdict


@pytest.mark.parametrize("level", [0.13, 1.0, 7.25])
@pytest.mark.parametrize("rate", [0.002, 1.0])
@pytest.mark.parametrize("digits", [2, 4])
def test_what_is_rounded_does_not_contradict(level: float, rate: float, digits: int) -> None:
    metrics = [{**each, "tolerance": 0.2, "margin": 0.1} for each in FOLLOWED]
    baseline = [_with(make_run(f"a{i}", level * (1 + n)), rate, (2, 1)) for i, n in enumerate(NOISE)]
    results = [_with(make_run(f"b{i}", level * (1 + n)), rate, (digits, 1)) for i, n in enumerate(OTHER)]
    found = judged(results, baseline, metrics=metrics).points[0].metrics
    assert not any("contradicts" in each.words for each in found)
