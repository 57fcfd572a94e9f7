"""A search among the points of a test: it submits few, learns from each, and says why it stops."""

import math
from typing import Any

import pytest

from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.runner import Judgement
from cloudai_mbridge.runner.context import Phase, Tracked
from cloudai_mbridge.runner.journal.journal import JournalEntry
from cloudai_mbridge.tune.measured_search import OUT_OF_MEMORY, PointSearch, positions_of

SIZES = [(tp, mb) for tp in (1, 2, 4, 8) for mb in (1, 2, 4, 8)]


def plan(tp: int, mb: int, iteration: int = 0, **search: Any) -> RunPlan:
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

    def __init__(self, plans: list[RunPlan], at_once: int = 1, failures: dict[str, str] | None = None) -> None:
        self.runs = [Tracked(each) for each in plans]
        self.failures = failures or {}
        self.search = PointSearch(plans, self.judge, at_once)
        self.waves: list[list[str]] = []

    def judge(self, run: RunPlan, entry: JournalEntry) -> Judgement:
        if failure := self.failures.get(run.label):
            return Judgement("failed", (failure,), is_success=False, failure=failure)
        coordinates = run.coordinates
        return Judgement("success", (), is_success=True, step_time_s=seconds(coordinates["tp"], coordinates["mb"]))

    @staticmethod
    def entry_of(key: str) -> JournalEntry:
        return JournalEntry(key, None, (), ())

    def run(self) -> str:
        """Bring the search to its end, and return why it stopped; "" if nothing was left."""
        while any(run.phase is Phase.WAITING for run in self.runs):
            choice = self.search.choose(self.runs, self.entry_of)
            if choice.over:
                return choice.over
            chosen = [run for run in self.runs if run.plan.key in choice.keys and run.phase is Phase.WAITING]
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
    assert bench.run() == "agent_steps = 3 allows no more"
    assert [len(wave) for wave in bench.waves] == [2, 1]


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


@pytest.mark.parametrize("other", [True, "b", None, 0])
def test_what_is_not_a_number_has_a_place_of_its_own(other: Any) -> None:
    where = positions_of([{"tp": 1, "x": "a"}, {"tp": 4, "x": "a"}, {"tp": 1, "x": other}])
    assert ((where[0] - where[1]) ** 2).sum() == pytest.approx(4)
    assert ((where[0] - where[2]) ** 2).sum() == pytest.approx(4)
