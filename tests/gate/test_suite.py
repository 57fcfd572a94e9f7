"""Gates of many points: the noise, the nodes and the nights that they share, and what changed for all."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.gate.comparison import tabulate
from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.gate.runs import ReferencePoint, RunResult, reference_from_runs
from cloudai_mbridge.gate.slow_nodes import night_numbers
from cloudai_mbridge.gate.suite import FEWEST_POINTS
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict
from tests.gate.some_runs import KEY, make_run
from tests.golden import Sentence

POINTS, RUNS, NOISE = 40, 5, 0.01
TODAY = date(2026, 6, 1)
WAIVER = {"metric": "step_time*", "until": date(2026, 12, 1), "by": "a", "reason": "the new driver, ticket 1"}


class Suite:
    """Simulated runs of many points. effects: (point's number, side, run's number, node) -> relative change."""

    def __init__(self, seed: int = 1, points: int = POINTS, noise: float = NOISE, num_nodes: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.points, self.noise = points, noise
        self.nodes = [f"n{i:02}" for i in range(num_nodes)]

    def sides(
        self,
        effect: Callable[[int, int, int, str], float] = lambda point, side, run, node: 0.0,
        ended: Callable[[int, int], str] = lambda side, run: "",
    ) -> tuple[list[ReferencePoint], list[RunResult]]:
        both: tuple[list[list[RunResult]], list[list[RunResult]]] = [], []
        for point in range(self.points):
            for side in (0, 1):
                both[side].append([self._run(point, side, run, effect, ended(side, run)) for run in range(RUNS)])
        return [reference_from_runs(runs) for runs in both[0]], [run for runs in both[1] for run in runs]

    def _run(self, point: int, side: int, run: int, effect: Any, ended_at: str) -> RunResult:
        node = str(self.rng.choice(self.nodes)) if self.nodes else ""
        level = math.exp(self.noise * self.rng.standard_normal()) * (1 + effect(point, side, run, node))
        found = make_run(f"{point}-{side}-{run}", level * (1 + point))
        name, key = f"sweep{point % 2}/tp{1 << point % 4}-{point}", {**KEY, "args.tp": 1 << point % 4}
        ids = {"point": name, "comparability_id": name, "comparability": key}
        return replace(found, **ids, nodes=(node,) if node else (), ended_at=ended_at)


def judged(references: Sequence[ReferencePoint], results: Sequence[RunResult], **policy: Any) -> GateResult:
    whole = GatePolicy.model_validate({"name": "p", "baseline": "b.toml", **policy})
    return judge_results(whole, references, results, where="baseline b.toml", today=TODAY)


def reds(result: GateResult) -> list[str]:
    return [point.point for point in result.points if point.verdict is GateVerdict.REGRESSION]


def test_one_slow_point_is_found_by_the_noise_of_all():
    slow = Suite().sides(lambda point, side, run, node: 0.03 * (side and point == 7))
    result = judged(*slow)
    assert (result.verdict, reds(result)) == (GateVerdict.REGRESSION, ["sweep1/tp8-7"])
    few = judged(slow[0][3:9], [run for run in slow[1] if run.point in {r.point for r in slow[0][3:9]}])
    name = {m.metric: m for m in next(p for p in few.points if p.point == "sweep1/tp8-7").metrics}["step_time_s"]
    of_all = {m.metric: m for m in next(p for p in result.points if p.point == "sweep1/tp8-7").metrics}["step_time_s"]
    assert name.p_value > 3 * of_all.p_value


def test_points_that_went_both_ways_are_not_called_all() -> None:
    both_ways = Suite().sides(lambda point, side, run, node: side * (0.06 if point < 25 else -0.06))
    result = judged(*both_ways)
    assert result.verdict is GateVerdict.REGRESSION
    assert len(reds(result)) >= 24
    assert not [found for found in result.shared if found.verdict is GateVerdict.REGRESSION]


def test_a_change_of_all_points_but_a_few_says_of_how_many() -> None:
    most = Suite().sides(lambda point, side, run, node: side * (0.02 if point < 37 else -0.04))
    together = judged(*most).shared[0]
    assert together.verdict is GateVerdict.REGRESSION
    assert re.match(r"37 of 40 points are \d\.\d\d % slower", together.metrics[0].words)


def test_no_change_passes_and_says_what_all_share():
    result = judged(*Suite().sides())
    assert result.verdict is GateVerdict.PASS
    (together,) = result.shared
    assert together.point == f"all {POINTS} points"
    assert "points are 0.1" in together.metrics[0].words
    assert not together.metrics[0].decides
    assert not result.slow_nodes


def test_a_point_that_is_far_noisier_does_not_blind_the_others():
    def effect(point: int, side: int, run: int, node: str) -> float:
        return 0.03 * (side and point == 7) + (0.08 * (-1) ** run if point in (3, 4) else 0.0)

    assert reds(judged(*Suite().sides(effect))) == ["sweep1/tp8-7"]


def test_a_change_of_all_is_one_finding():
    result = judged(*Suite().sides(lambda point, side, run, node: 0.012 * side))
    assert result.verdict is GateVerdict.REGRESSION
    assert result.exit_code == 10
    (together,) = result.shared
    found = together.metrics[0]
    assert (together.verdict, found.metric, found.decides) == (GateVerdict.REGRESSION, "step_time_s", True)
    assert found.words.startswith(f"all {POINTS} points are 1.")
    assert " % slower (95 % bounds" in found.words
    assert not reds(result), "none of them changed by more than all"


def test_a_large_change_of_all_makes_every_point_red():
    result = judged(*Suite().sides(lambda point, side, run, node: 0.06 * side))
    assert len(reds(result)) == POINTS
    assert all("as all points are" in point.metrics[0].words for point in result.points)
    better = judged(*Suite().sides(lambda point, side, run, node: -0.06 * side))
    assert (better.verdict, better.shared[0].verdict) == (GateVerdict.IMPROVEMENT, GateVerdict.IMPROVEMENT)
    all_but_one = judged(*Suite().sides(lambda point, side, run, node: -0.04 * (side and point != 7)))
    assert not reds(all_but_one)


def test_a_change_of_a_group_is_one_finding():
    result = judged(*Suite().sides(lambda point, side, run, node: 0.015 * (side and point % 4 == 3)))
    assert result.verdict is GateVerdict.REGRESSION
    (_, group) = result.shared
    assert group.point == "10 points with args.tp = 8"
    assert "the others changed by" in group.metrics[0].words


def test_a_field_with_one_value_makes_no_group() -> None:
    """Comparability leaves out arguments at their default, so some points lack a field that others have."""

    def marked(each: Any) -> Any:
        is_one = int(each.point.rpartition("-")[2]) % 4 == 3
        return replace(each, comparability={**each.comparability, "args.cuda_graphs": True}) if is_one else each

    references, results = Suite().sides(lambda point, side, run, node: 0.015 * (side and point % 4 == 3))
    (_, group) = judged([*map(marked, references)], [*map(marked, results)]).shared
    assert group.point == "10 points with args.tp = 8"


@pytest.mark.parametrize("slowdown", [0.0, 0.03])
def test_slow_nodes_are_a_reason_and_not_noise(slowdown):
    slow = {"n03", "n17", "n22", "n30"}
    suite = Suite(num_nodes=40)
    result = judged(
        *suite.sides(lambda point, side, run, node: slowdown * (side and point == 7) + 0.05 * (node in slow))
    )
    assert {node.node for node in result.slow_nodes} == slow
    assert all(node.interval[0] < 0.05 < node.interval[1] for node in result.slow_nodes)
    assert any("node n03 makes its" in note and "% slower" in note for note in result.notes)
    assert reds(result) == (["sweep1/tp8-7"] if slowdown else [])


def test_of_nodes_that_were_never_apart_one_is_slow(sentence: Sentence):
    references, results = Suite(num_nodes=20).sides(lambda point, side, run, node: 0.06 * (node == "n03"))
    pair = ("n03", "n99")
    references = [
        replace(each, runs=tuple(replace(run, nodes=pair) if "n03" in run.nodes else run for run in each.runs))
        for each in references
    ]
    result = judged(references, [replace(run, nodes=pair) if "n03" in run.nodes else run for run in results])
    (note,) = (note for note in result.notes if "that is taken out" in note)
    sentence(note)


def test_slow_nodes_are_taken_out_of_rates_as_well():
    slow = {"n03", "n17", "n22", "n30"}
    suite = Suite(num_nodes=40)
    sides = suite.sides(lambda point, side, run, node: 0.03 * (side and point == 7) + 0.05 * (node in slow))
    assert reds(judged(*sides, metrics=[{"name": "tokens_per_s_per_gpu"}])) == ["sweep1/tp8-7"]


def test_rates_do_not_contradict_times_of_which_a_slow_node_was_taken_out():
    """A node that is 40 % slower moves the mean of five runs by 7 %, in time and in TFLOP/s."""
    result = judged(*Suite(num_nodes=20).sides(lambda point, side, run, node: 0.4 * (node == "n03")))
    assert [node.node for node in result.slow_nodes] == ["n03"]
    assert GateVerdict.NOT_RUN not in {metric.verdict for point in result.points for metric in point.metrics}


def test_a_point_that_only_ran_on_one_node_is_not_excused_by_it():
    """Its new runs are slower, and all of them on a node that nothing else ran on: the node says nothing."""
    references, results = Suite(num_nodes=20).sides(lambda point, side, run, node: 0.06 * (side and point == 7))
    moved = [replace(run, nodes=("alone",)) if run.point == "sweep1/tp8-7" else run for run in results]
    result = judged(references, moved)
    assert reds(result) == ["sweep1/tp8-7"]
    assert not result.slow_nodes


def test_nights_are_apart_by_six_hours() -> None:
    evening, morning = "2026-03-01T23:00:00+00:00", "2026-03-02T04:00:00+02:00"
    next_evening = "2026-03-02T23:30:00+00:00"
    assert list(night_numbers([next_evening, evening, "", morning, "2026-03-03"])) == [1, 0, -1, 0, -1]


def nights(side: int, run: int) -> str:
    return f"2026-05-{20 if side else 10 + run}T03:00:00+00:00"


def test_what_nights_differ_by_is_noise_of_all_points():
    """Each night of the reference has a level of its own, and so has that of the result: 1.1 % more than their mean."""
    of_night = (0.006, -0.007, 0.004, -0.005, 0.002)
    result = judged(*Suite().sides(lambda point, side, run, node: 0.011 if side else of_night[run], nights))
    assert result.shared[0].verdict is GateVerdict.PASS
    assert "nights differ by 0." in result.shared[0].metrics[0].words
    assert not reds(result)
    unknown = judged(*Suite().sides(lambda point, side, run, node: 0.011 if side else of_night[run]))
    assert unknown.shared[0].verdict is GateVerdict.REGRESSION, "without dates nobody can tell nights from a change"
    quiet = judged(*Suite().sides(lambda point, side, run, node: 0.02 * side, nights))
    assert quiet.shared[0].verdict is GateVerdict.REGRESSION


def test_the_table_of_a_comparison_keeps_points_of_one_name() -> None:
    """Work of the old side that the new one lacks is a row of its own, beside the work that was compared."""
    first, second = ([make_run(f"o{key}{i}", 1 + 0.001 * i) for i in range(5)] for key in "ab")
    second = [replace(run, comparability_id="other", comparability={**KEY, "args.tp": 9}) for run in second]
    slower = [make_run(f"n{i}", 1.05 + 0.001 * i) for i in range(5)]
    before = [reference_from_runs(first), reference_from_runs(second)]
    rows = tabulate(judged(before, slower), "step_time_s", [*first, *second], slower).points
    assert [row.excluded for row in rows].count(None) + [row.excluded for row in rows].count("") == 1
    assert len(rows) == 2


def test_few_points_are_judged_as_each_alone():
    suite = Suite(points=FEWEST_POINTS - 1)
    references, results = suite.sides()
    together = judged(references, results)
    assert not together.shared
    for reference in references:
        alone = judged([reference], [run for run in results if run.point == reference.point])
        (point,) = [point for point in together.points if point.point == reference.point]
        assert [m.p_value for m in point.metrics] == [m.p_value for m in alone.points[0].metrics]


def test_waivers_of_all_points_cover_what_they_share():
    waivers = [{**WAIVER, "point": "sweep*", "up_to": 0.1}]
    sides = Suite().sides(lambda point, side, run, node: 0.012 * side)
    assert judged(*sides).verdict is GateVerdict.REGRESSION
    assert judged(*sides, waivers=waivers).verdict is GateVerdict.PASS
    assert judged(*sides, waivers=[{**waivers[0], "point": "sweep0/*"}]).verdict is GateVerdict.REGRESSION


def test_a_waived_change_of_all_points_makes_none_of_them_red():
    """All are 1.2 % slower, and some seem 2 %, of which the bounds are not within what is waived."""
    waivers = [{**WAIVER, "point": "*", "up_to": 0.03}]
    for seed in range(3):
        result = judged(*Suite(seed).sides(lambda point, side, run, node: 0.012 * side), waivers=waivers)
        assert result.shared[0].metrics[0].waived
        assert not reds(result)
    large = judged(*Suite().sides(lambda point, side, run, node: 0.06 * side), waivers=[{**waivers[0], "up_to": 0.1}])
    assert large.verdict is GateVerdict.PASS
