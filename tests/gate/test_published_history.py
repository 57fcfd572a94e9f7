"""A regression that was published: GPT-OSS 120B on GB200 at 943, then 597, then 934 TFLOP/s per GPU.

The tables give one number per release. Five runs with 1 % of noise stand for each, from three seeds.
"""

import random
from datetime import date
from pathlib import Path

import pytest

from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.gate.promotion import Terms, propose
from cloudai_mbridge.gate.runs import RunResult, reference_from_runs
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict
from cloudai_mbridge.report.model import comparability_id
from tests.gate.some_runs import make_run

POLICY = GatePolicy.model_validate({"name": "nightly", "baseline": "b.toml"})
TERMS = Terms(by="test", at="2026-01-01T00:00:00+00:00", reason="five runs of one release")
STEP_TIME_OF = 1e3  # s x TFLOP/s: the work of a step


def release(name: str, tflops: float, seed: int) -> list[RunResult]:
    """Return five runs at a published level."""
    rng = random.Random(f"{name}{seed}")
    levels = [STEP_TIME_OF / tflops * rng.lognormvariate(0, 0.01) for _ in range(5)]
    key = comparability_id({})
    return [make_run(f"{name}{i}", level, comparability_id=key, comparability={}) for i, level in enumerate(levels)]


def gate(baseline: Path, results: list[RunResult]) -> GateResult:
    references = load_baseline(baseline).references()
    return judge_results(POLICY, references, results, where="baseline b.toml", today=date(2026, 1, 1))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_drop_is_red_at_once_and_never_promoted_and_the_recovery_is_green(seed: int, tmp_path: Path) -> None:
    baseline = tmp_path / "b.toml"
    good, bad, back = (release(name, level, seed) for name, level in (("a", 943.0), ("b", 597.0), ("c", 934.0)))
    first = propose(baseline, {"test/point": good}, TERMS)
    assert not first.refusals
    baseline.write_bytes(first.new)

    for count in range(1, 6):
        result = gate(baseline, bad[:count])
        assert result.verdict is GateVerdict.REGRESSION, count
        assert result.points[0].metrics[0].change == pytest.approx(943 / 597 - 1, abs=0.05)
    (reasons,) = propose(baseline, {"test/point": bad}, TERMS).refusals.values()
    assert "step_time_s" in " ".join(reasons)

    assert gate(baseline, back[:1]).verdict is GateVerdict.INCONCLUSIVE
    assert gate(baseline, back).verdict is GateVerdict.PASS


def test_three_single_numbers_need_the_noise_to_be_assumed() -> None:
    """The tables' own three values, one run each: called with an assumed noise of 2 %, and doubtful without."""
    levels = {
        name: make_run(name, STEP_TIME_OF / tflops) for name, tflops in (("a", 943.0), ("b", 597.0), ("c", 934.0))
    }
    reference = reference_from_runs([levels["a"]])
    for noise, verdict in ((None, GateVerdict.INCONCLUSIVE), (0.02, GateVerdict.REGRESSION)):
        policy = POLICY.model_copy(update={"assumed_noise": noise})
        for name, expected in (("b", verdict), ("c", GateVerdict.INCONCLUSIVE)):
            result = judge_results(policy, [reference], [levels[name]], where="a", today=date(2026, 1, 1))
            assert result.verdict is expected
