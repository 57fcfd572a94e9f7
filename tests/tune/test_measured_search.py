"""A search among the points of a test: it submits few, learns from each, and says why it stops."""

import math
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.metrics import capped
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.runner import Judgement
from cloudai_mbridge.runner.context import Phase, Tracked
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.schedulers.interface import ENDED_EARLY, JobClass, JobStatus
from cloudai_mbridge.tune.measured_search import OUT_OF_MEMORY, PointSearch, is_slower, noise_of, positions_of
from tests.cases import every

SIZES = [(tp, mb) for tp in (1, 2, 4, 8) for mb in (1, 2, 4, 8)]


def plan(tp: int, mb: int, iteration: int = 0, **search: Any) -> RunPlan:
    """Plan a run; with is_again=True one that measures its point again."""
    label = f"tp{tp}-mb{mb}"
    return RunPlan(
        key=f"t/{label}/{iteration}",
        test_id="t",
        test_name="t",
        label=label,
        iteration=iteration,
        coordinates={"tp": tp, "mb": mb},
        args={},
        recipe="r",
        num_nodes=1,
        ranks_per_node=8,
        num_steps=10,
        warmup_steps=3,
        training_config={},
        definition={},
        env={},
        secret_env={},
        search=SearchPlan(**search),
    )


def seconds(tp: int, mb: int) -> float:
    """The best is tp2-mb4."""
    return 1.0 + 0.2 * abs(math.log2(tp) - 1) + 0.1 * abs(math.log2(mb) - 2)


class Bench:
    """Runs that a search submits, and ends at once."""

    def __init__(
        self,
        plans: list[RunPlan],
        at_once: int = 1,
        failures: dict[str, str] | None = None,
        times: dict[str, float] | None = None,
    ) -> None:
        """times: of runs, by key, that differ from `seconds`."""
        self.runs = [Tracked(each) for each in plans]
        self.failures, self.times = failures or {}, times or {}
        self.search = PointSearch(plans, self.judge, at_once)
        self.waves: list[list[str]] = []

    def judge(self, run: RunPlan, entry: JournalEntry) -> Judgement:
        if failure := self.failures.get(run.label):
            return Judgement("failed", (failure,), is_success=False, failure=failure)
        own = seconds(run.coordinates["tp"], run.coordinates["mb"])
        return Judgement("success", (), is_success=True, step_time_s=self.times.get(run.key, own))

    @staticmethod
    def entry_of(key: str) -> JournalEntry:
        return JournalEntry(key, None, (), ())

    def run(self) -> str:
        """Bring the search to its end, and return why it stopped; "" if nothing was left."""
        while any(run.phase is Phase.WAITING for run in self.runs):
            keys, over = self.search.choose(self.runs, self.entry_of)
            if over:
                return over
            chosen = [run for run in self.runs if run.plan.key in keys and run.phase is Phase.WAITING]
            assert chosen
            for run in chosen:
                run.number, run.phase = 1, Phase.ENDED
            self.waves.append([run.plan.key for run in chosen])
        return ""

    @property
    def tried(self) -> list[str]:
        return [key.split("/")[1] for wave in self.waves for key in wave]


def predicted(tp: int, mb: int) -> dict[str, Any]:
    return {"groups": (1.5 * seconds(tp, mb), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), "memory_share": mb / 10}


def test_with_predictions_few_points_are_tried() -> None:
    bench = Bench([plan(tp, mb, **predicted(tp, mb)) for tp, mb in SIZES])
    ending = bench.run()
    assert bench.tried[0] == "tp2-mb4"
    assert len(bench.tried) <= 5
    assert "none of the others is over 2% faster than tp2-mb4" in ending


@pytest.mark.parametrize(("is_calibrated", "tried"), [(True, 1), (False, 2)])
def test_calibrated_predictions_are_trusted_more(is_calibrated: bool, tried: int) -> None:
    """Of one point all is compute, of the other launches: as shipped, the predictions may be off by twice and more."""
    parts = {1: (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 2: (0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0)}
    bench = Bench([plan(tp, 1, groups=parts[tp], is_calibrated=is_calibrated) for tp in parts])
    bench.times = {run.plan.key: sum(parts[run.plan.coordinates["tp"]]) for run in bench.runs}
    bench.run()
    assert len(bench.tried) == tried


@every("factor", [0.01, 1.0, 1000.0])
def test_another_gpus_predictions_give_the_order(factor: float) -> None:
    """They say which point to try first, whatever the device's own speed is, and are not trusted to stop early."""
    parts = {size: (factor * seconds(*size), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for size in SIZES}
    bench = Bench([plan(*size, groups=parts[size], is_guess=True) for size in SIZES])
    bench.run()
    assert bench.tried[0] == "tp2-mb4"
    certain = Bench([plan(*size, **predicted(*size)) for size in SIZES])
    certain.run()
    assert len(bench.tried) > len(certain.tried)


def test_predictions_for_another_gpu_support_no_claim() -> None:
    """They promise that a larger micro-batch is much faster; here the middle is. One noisy point says nothing of it."""
    sizes = [(1, mb) for mb in (1, 2, 4, 8, 16)]
    groups = {size: (4.0 / size[1], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for size in sizes}

    def search(*, is_guess: bool) -> tuple[Bench, str]:
        bench = Bench([plan(*size, groups=groups[size], is_guess=is_guess) for size in sizes])
        bench.times = {
            f"t/tp1-mb{mb}/0": seconds for (_, mb), seconds in zip(sizes, (3.0, 2.0, 1.0, 2.0, 3.0), strict=True)
        }
        return bench, bench.run()

    bench, ending = search(is_guess=True)
    assert bench.tried[0] == "tp1-mb16"
    assert "tp1-mb4" in bench.tried
    assert "(from the measured points alone), none of the others is over 2% faster than tp1-mb4" in ending
    assert "measured points alone" not in search(is_guess=False)[1]


def test_predictions_that_prove_wrong_are_no_better_than_another_gpus() -> None:
    """All are predicted alike. The first is 240 times slower, the second 100 times: of others little is known."""
    groups = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    bench = Bench([plan(*size, groups=groups, max_trials=2) for size in SIZES])
    bench.times = {run.plan.key: 240.0 if run.plan.label == "tp1-mb1" else 100.0 for run in bench.runs}
    assert 0.2 < chance_in(bench.run()) < 0.8
    assert bench.tried[0] == "tp1-mb1"


def test_points_that_a_limit_leaves_untried_may_still_be_better() -> None:
    trials, hours = (Bench([plan(tp, mb, **limit) for tp, mb in SIZES]) for limit in ({"max_trials": 1}, {}))
    hours.search.choose(hours.runs, hours.entry_of)
    for run in hours.runs:
        run.phase, run.number = Phase.ENDED, int(run.plan.label == "tp1-mb1")
    _, over = hours.search.choose(hours.runs, hours.entry_of)
    assert chance_in(over) == pytest.approx(chance_in(trials.run()), abs=0.05)
    assert chance_in(over) < 0.5
    assert over.startswith("no other point may be tried; with ")


def chance_in(ending: str) -> float:
    """Return the probability that no other point is faster, in the words of an ending."""
    return float(ending.partition("with probability ")[2].partition("%")[0]) / 100


def test_without_predictions_the_best_is_found_too() -> None:
    bench = Bench([plan(tp, mb) for tp, mb in SIZES])
    bench.run()
    assert min(seconds(*map(int, name[2:].split("-mb"))) for name in bench.tried) == seconds(2, 4)


def test_several_are_tried_at_once() -> None:
    bench = Bench([plan(tp, mb, **predicted(tp, mb)) for tp, mb in SIZES], at_once=3)
    bench.run()
    assert len(bench.waves[0]) == 3
    assert len(set(bench.tried)) == len(bench.tried)


def test_the_number_of_trials_is_limited() -> None:
    bench = Bench([plan(tp, mb, max_trials=3) for tp, mb in SIZES], at_once=2)
    ending = bench.run()
    assert ending.startswith("agent_steps = 3 allows no more; with probability ")
    assert "none of the others is over 2% faster than tp" in ending
    assert [len(wave) for wave in bench.waves][:2] == [2, 1]
    assert len(set(bench.tried)) == 3


def test_what_runs_out_of_memory_says_where_the_space_ends() -> None:
    """Larger micro-batches are predicted to be faster, and none of them fits."""
    plans = [plan(tp, mb, groups=(1 / mb, 0, 0, 0, 0, 0, 0, 0), memory_share=0.85 + mb / 40) for tp, mb in SIZES]
    failures = {f"tp{tp}-mb{mb}": OUT_OF_MEMORY for tp, mb in SIZES if mb > 2}
    bench = Bench(plans, failures=failures)
    bench.run()
    assert sum(name in failures for name in bench.tried) <= len(failures) / 2
    assert any(name not in failures for name in bench.tried)


def test_a_point_that_fails_is_not_the_end() -> None:
    bench = Bench([plan(tp, mb, **predicted(tp, mb)) for tp, mb in SIZES], failures={"tp2-mb4": "nan_loss"})
    assert "faster than tp" in bench.run()
    assert "tp2-mb4" in bench.tried


def test_repetitions_are_one_trial() -> None:
    plans = [plan(tp, mb, iteration, **predicted(tp, mb)) for tp, mb in SIZES for iteration in (0, 1)]
    bench = Bench(plans)
    bench.run()
    assert bench.waves[0] == ["t/tp2-mb4/0", "t/tp2-mb4/1"]


def test_another_process_goes_on_with_what_was_learned() -> None:
    first, second = (Bench([plan(tp, mb, **predicted(tp, mb)) for tp, mb in SIZES]) for _ in range(2))
    ending = first.run()
    for run in second.runs:
        if run.plan.label in first.tried[:1]:
            run.number, run.phase = 1, Phase.ENDED
    assert second.run() == ending
    assert second.tried == first.tried[1:]


@every("other", [True, "b", None, 0])
def test_what_is_not_a_number_has_a_place_of_its_own(other: Any) -> None:
    where = positions_of([{"tp": 1, "x": "a"}, {"tp": 4, "x": "a"}, {"tp": 1, "x": other}])
    assert ((where[0] - where[1]) ** 2).sum() == pytest.approx(4)
    assert ((where[0] - where[2]) ** 2).sum() == pytest.approx(4)


def with_one_again(**times: float) -> Bench:
    """Return four points, each with a run that measures it again; times: of runs, such as tp4_1, else 2 s.

    tp1 and tp4 are predicted to be twice as fast as the others.
    """
    groups = {tp: (2.0 - (tp in (1, 4)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for tp in (1, 2, 4, 8)}
    plans = [plan(tp, 1, i, is_again=i == 1, groups=groups[tp]) for tp in groups for i in (0, 1)]
    keys = {f"t/tp{name[2]}-mb1/{name[-1]}": seconds for name, seconds in times.items()}
    return Bench(plans, times={f"t/tp{tp}-mb1/{i}": 2.0 for tp in groups for i in (0, 1)} | keys)


def test_the_two_fastest_are_measured_again_after_the_last_trial_that_is_allowed() -> None:
    plans = [plan(tp, 1, i, is_again=i == 1, max_trials=2) for tp in (1, 2, 4, 8) for i in (0, 1)]
    bench = Bench(plans, times={each.key: 1.0 for each in plans})
    ending = bench.run()
    assert [len(wave) for wave in bench.waves] == [1, 1, 2]
    assert len(set(bench.tried)) == 2
    assert ending.startswith("agent_steps = 2 allows no more; with probability ")


def test_the_two_fastest_are_measured_again_if_they_are_close() -> None:
    bench = with_one_again(tp1_0=1.0, tp1_1=1.02, tp4_0=1.003, tp4_1=0.98)
    ending = bench.run()
    assert sorted(key for wave in bench.waves for key in wave if key.endswith("/1")) == ["t/tp1-mb1/1", "t/tp4-mb1/1"]
    assert "over 2% faster than tp4-mb1; with" in ending
    assert ending.endswith("it is faster than tp1-mb1")


def test_what_is_clear_is_not_measured_again() -> None:
    bench = with_one_again(tp1_0=1.0, tp4_0=1.1)
    ending = bench.run()
    assert not [key for wave in bench.waves for key in wave if key.endswith("/1")]
    assert "with 100.0%, it is faster than tp4-mb1" in ending


def test_another_process_knows_what_was_measured_again() -> None:
    first = with_one_again(tp1_0=1.0, tp1_1=1.02, tp4_0=1.003, tp4_1=0.98)
    ending = first.run()
    second = with_one_again(tp1_0=1.0, tp1_1=1.02, tp4_0=1.003, tp4_1=0.98)
    done = [key for wave in first.waves for key in wave]
    for run in second.runs:
        if run.plan.key in done:
            run.number, run.phase = 1, Phase.ENDED
    assert second.run() == ending
    assert not second.waves


def test_a_failed_repetition_does_not_undo_a_point() -> None:
    bench = with_one_again(tp1_0=1.0, tp4_0=1.003)
    judge = bench.search._judge
    bench.search._judge = lambda run, entry: (
        Judgement("failed", ("x",), is_success=False, failure="nan_loss", step_time_s=0.1)
        if run.key == "t/tp1-mb1/1"
        else judge(run, entry)
    )
    assert "faster than tp1-mb1" in bench.run()
    trial = bench.search._outcomes["tp1-mb1"]
    assert trial is not None
    assert trial.step_time_s == 1.0


def test_where_nothing_succeeds_every_point_is_tried() -> None:
    bench = Bench([plan(tp, mb) for tp, mb in SIZES], failures={f"tp{tp}-mb{mb}": "nan_loss" for tp, mb in SIZES})
    bench.run()
    assert len(bench.tried) == len(SIZES)


def test_noise_is_learned_from_repetitions() -> None:
    assert noise_of([[1.0], [2.0]]) == pytest.approx(0.01)
    assert noise_of([[1.0, 1.0], [2.0, 2.0]] * 10) < 0.004
    assert noise_of([[1.0, 1.2], [2.0, 2.2], [1.0, 0.8]]) > 0.05


def test_a_trial_is_slow_only_if_it_is_certain() -> None:
    assert is_slower([1.2, 1.21, 1.19, 1.2], 1.0, 0.01, 0.01)
    assert not is_slower([1.2, 1.21, 1.19], 1.0, 0.01, 0.01)
    assert not is_slower([1.02] * 50, 1.0, 0.01, 0.01)
    assert not is_slower([1.0, 1.6, 1.2, 1.4], 1.0, 0.01, 0.01)
    assert is_slower([1.2] * 50, 1.0, 0.0, 0.01)


@every("step_noise", [0.0, 0.01, 0.1])
def test_a_trial_as_fast_as_the_best_is_hardly_ever_ended(step_noise: float) -> None:
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(2000):  # looked at after every step
        between = math.exp(draw.normal(0, 0.01))
        best = math.exp(draw.normal(0, 0.01))
        steps = between * np.exp(draw.normal(0, step_noise, 50))
        wrong += any(is_slower(steps[:number].tolist(), best, 0.01, 0.01) for number in (4, 5, 8, 11, 16, 22, 32, 45))
    assert wrong <= 12  # one in 1000 at each of eight looks, most of which see the same


def test_steps_that_take_long_now_and_then_do_not_end_a_trial() -> None:
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(100):  # the best point's time is a capped mean, too
        run, best = np.exp(draw.normal(0, 0.01, (2, 512)))
        run[::4] *= 2
        best[::4] *= 2
        within = capped(best.tolist())
        error = float(np.std(within)) / math.sqrt(512)
        wrong += any(is_slower(run[: 4 << look].tolist(), float(np.mean(within)), error, 0.01) for look in range(8))
    assert wrong <= 1


def test_a_slow_trial_is_ended_and_is_not_the_best() -> None:
    bench = Bench([plan(tp, mb, **predicted(tp, mb)) for tp, mb in SIZES], at_once=2)
    first, second = bench.runs[SIZES.index((2, 4))], bench.runs[SIZES.index((2, 8))]
    assert bench.search.why_end(second.plan, [9.0] * 20) == ""  # nothing to compare with yet
    bench.search.choose(bench.runs, bench.entry_of)
    first.number, first.phase = 1, Phase.ENDED
    second.number, second.phase = 1, Phase.ACTIVE
    bench.search.choose(bench.runs, bench.entry_of)
    assert bench.search.why_end(second.plan, [seconds(2, 4)] * 20) == ""
    assert "slower than tp2-mb4" in bench.search.why_end(second.plan, [2 * seconds(2, 4)] * 20)
    assert bench.search.why_end(first.plan, [9.0] * 20) == ""
    second.phase, second.status = Phase.ENDED, JobStatus(ENDED_EARLY, JobClass.CANCELLED)
    bench.times["t/tp2-mb8/0"] = 0.1  # whatever its steps say
    assert "faster than tp2-mb4" in bench.run()
