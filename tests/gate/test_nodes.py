"""Slow nodes, told from the runs on them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.nodes import (
    NodeRun,
    NodesResult,
    NodeVerdict,
    OddFact,
    judge_nodes,
    odd_facts,
    runs_of_history,
    runs_on_nodes,
)
from cloudai_mbridge.gate.slow_nodes import chance_of
from tests.gate.history_data import make_point, write_report
from tests.gate.some_runs import make_run

NAMES = [f"n{i:02}" for i in range(24)]


def in_rounds(
    slow: Mapping[str, float],
    rounds: int = 4,
    per_run: int = 1,
    noise: float = 0.01,
    seed: int = 3,
    num_nodes: int = 24,
) -> list[NodeRun]:
    """Every round, all nodes in groups made by chance; a round is a cell."""
    rng = np.random.default_rng(seed)
    runs = []
    for number in range(rounds):
        order = rng.permutation(NAMES[:num_nodes])
        for group in order.reshape(-1, per_run):
            effect = max(slow.get(str(name), 0.0) for name in group)
            time = math.exp(noise * rng.standard_normal()) * (1 + effect) * (1 + number / 10)
            runs.append(NodeRun(f"round {number}", tuple(map(str, group)), time))
    return runs


def verdicts(result: NodesResult) -> dict[str, NodeVerdict]:
    return {node.node: node.verdict for node in result.nodes}


@pytest.mark.parametrize("per_run", [1, 2, 4])
def test_slow_nodes_are_named_and_no_others(per_run: int) -> None:
    result = judge_nodes(in_rounds({"n03": 0.05, "n17": 0.06}, rounds=6, per_run=per_run))
    assert {node.node for node in result.slow} == {"n03", "n17"}
    for node in result.slow:
        assert node.interval is not None
        assert node.interval[0] < {"n03": 0.05, "n17": 0.06}[node.node] < node.interval[1]
        assert node.runs == 6
    assert [node.node for node in result.nodes][:2] == ["n17", "n03"], "the slowest first"
    assert NodeVerdict.TOO_FEW not in verdicts(result).values()


def test_no_node_is_slow_where_none_is() -> None:
    for seed in range(30):
        assert not judge_nodes(in_rounds({}, seed=seed)).slow


def nightly(slow: str, points: int = 8, nights: int = 12, seed: int = 2) -> list[NodeRun]:
    """One run of every point a night, on a node by chance; points and nights have levels of their own."""
    rng = np.random.default_rng(seed)
    runs = []
    for night in range(nights):
        level = 0.02 * rng.standard_normal()
        for point in range(points):
            node = str(rng.choice(NAMES[:8]))
            time = (1 + point) * math.exp(level + 0.01 * rng.standard_normal()) * (1.06 if node == slow else 1)
            runs.append(NodeRun(f"{night}/{point}", (node,), time, f"p{point}", f"night {night}"))
    return runs


def test_a_slow_node_is_found_in_nights_with_one_run_of_each_point() -> None:
    result = judge_nodes(nightly("n03"))
    assert [node.node for node in result.slow] == ["n03"]
    assert result.slow[0].effect == pytest.approx(0.06, abs=0.015)
    assert result.noise == pytest.approx(0.01, rel=0.3)
    assert not any(judge_nodes(nightly("", seed=seed)).slow for seed in range(30))


def test_three_nights_are_too_few_for_a_level_of_each_point() -> None:
    assert set(verdicts(judge_nodes(nightly("n03", nights=3))).values()) == {NodeVerdict.TOO_FEW}


def test_a_history_tells_its_runs_with_their_nights(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with History(tmp_path / "history.sqlite") as history:
        for number in range(6):
            points = [
                make_point(
                    (1 + point) * math.exp(0.01 * rng.standard_normal()),
                    number=number,
                    label=f"tp={point}",
                    environment={"nodes": [f"n{(number + point) % 4}"]},
                )
                for point in range(4)
            ]
            history.import_report(write_report(tmp_path / f"{number}.json", points))
        runs = runs_of_history(history)
        assert len(runs) == 24
        assert len({run.night for run in runs}) == 6
        assert len({run.point for run in runs}) == 4
        assert {run.nodes for run in runs} == {(f"n{i}",) for i in range(4)}
        ids = [
            run.run_id for key in sorted(history.keys()) for run, _, _ in history.series(key, "step_time_s", 100).runs
        ]
        assert len(runs_of_history(history, without=ids[:5])) == 19
    assert {node.verdict for node in judge_nodes(runs).nodes} <= {NodeVerdict.NORMAL, NodeVerdict.TOO_FEW}


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_one_run_alone_makes_no_node_slow(rounds: int) -> None:
    runs = in_rounds({}, rounds=rounds)
    slowest = replace(runs[7], step_time_s=1.3 * runs[7].step_time_s)
    result = judge_nodes([*runs[:7], slowest, *runs[8:]])
    assert not result.slow
    assert verdicts(result)[slowest.nodes[0]] is NodeVerdict.TOO_FEW


@pytest.mark.parametrize("rounds", [2, 4])
def test_one_fast_run_alone_makes_no_node_normal(rounds: int) -> None:
    runs = in_rounds({"n05": 0.05}, rounds, noise=0.003)
    first = next(number for number, run in enumerate(runs) if "n05" in run.nodes)
    runs[first] = replace(runs[first], step_time_s=runs[first].step_time_s * 0.9)
    found = verdicts(judge_nodes(runs))
    assert found["n05"] is not NodeVerdict.NORMAL
    assert list(found.values()).count(NodeVerdict.NORMAL) > 20


def test_how_probable_the_slowest_runs_of_one_node_are() -> None:
    """As often as two of 512 runs are the slowest, if they hardly are; then less, as t and exponential say."""
    noise = norm.ppf((np.arange(512) + 0.5) / 512)
    largest = norm.ppf(511.5 / 512)
    assert chance_of(np.array([9.0, 1.0001 * largest]), noise) == pytest.approx(2 / 512 / 511, rel=0.01)
    assert chance_of(np.array([9.0, 0.9999 * largest]), noise) == pytest.approx(6 / 512 / 511, rel=0.01)
    assert chance_of(np.array([9.0, 2 * largest]), noise) == pytest.approx(2 / 512 / 511 / 2**6, rel=0.1)
    assert chance_of(np.array([9.0]), noise) == 1
    assert chance_of(np.array([9.0, -9.0]), noise) == 1
    three = chance_of(np.array([3.0, 3.0, 3.0]), noise)
    assert three < chance_of(np.array([3.0, 3.0, -1.0]), noise) < 0.01
    assert chance_of(np.array([0.01, 0.01]), np.zeros(8)) == 0


@pytest.mark.parametrize("name", ["normal", "heavy", "skewed"])
def test_two_slow_runs_of_a_node_are_as_rare_as_they_are_said_to_be(name: str) -> None:
    draw = np.random.default_rng(4)
    samples: dict[str, Callable[[], np.ndarray]] = {
        "normal": lambda: draw.standard_normal((64, 2)),
        "heavy": lambda: draw.standard_t(3, (64, 2)),
        "skewed": lambda: draw.exponential(size=(64, 2)) - 1,
    }
    rate, times = 0.05, 400
    found = 0
    for _ in range(times):
        runs = samples[name]()
        slowest = int(runs.min(axis=1).argmax())
        without_effect = runs[slowest] - runs[slowest].mean()
        noise = np.concatenate([np.delete(runs, slowest, axis=0).ravel(), without_effect])
        found += chance_of(runs[slowest], noise) <= rate / 64
    assert found <= 1.5 * rate * times


@pytest.mark.parametrize("noise", [1e-16, 1e-14, 1e-12, 1e-9, 1e-3])
def test_runs_that_hardly_differ(noise: float) -> None:
    result = judge_nodes(in_rounds({"n03": 0.05}, rounds=3, num_nodes=6, noise=noise))
    assert [node.node for node in result.slow] == ["n03"]


def test_skewed_noise_makes_no_node_slow() -> None:
    """Many a run is three standard deviations above the others; two of them are not many enough."""
    named = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        times = 1 + 0.01 * draw.exponential(size=(64, 2))
        runs = [NodeRun("a", (f"n{node}",), float(time)) for node, own in enumerate(times) for time in own]
        named += bool(judge_nodes(runs).slow)
    assert named <= 2, named


def test_one_run_a_node_is_too_few() -> None:
    runs = [replace(run, cell=f"{run.cell} {number}") for number, run in enumerate(in_rounds({"n03": 0.05}, rounds=1))]
    result = judge_nodes(runs)
    assert set(verdicts(result).values()) == {NodeVerdict.TOO_FEW}
    assert result.nodes[0].effect is None
    assert result.noise is None


def test_a_node_whose_runs_never_have_others_beside_them_says_nothing() -> None:
    alone = [NodeRun("its own point", ("n99",), time) for time in (9.0, 9.1, 9.05)]
    result = judge_nodes([*in_rounds({}), *alone])
    assert verdicts(result)["n99"] is NodeVerdict.TOO_FEW
    assert not result.slow


def test_a_slow_node_does_not_make_its_companions_slow() -> None:
    """Each of them has been in fast company once."""
    result = judge_nodes(in_rounds({"n03": 0.08}, rounds=3, per_run=4, noise=0.003, seed=4))
    assert {node.node for node in result.slow} == {"n03"}


def test_nodes_that_were_never_apart_are_not_told_apart() -> None:
    runs = in_rounds({"n03": 0.08}, rounds=4)
    pairs = [replace(run, nodes=("n03", "n17")) if "n03" in run.nodes else run for run in runs]
    result = judge_nodes([run for run in pairs if run.nodes != ("n17",)])
    assert not result.slow
    assert verdicts(result)["n03"] is verdicts(result)["n17"] is NodeVerdict.TOO_FEW
    assert result.notes == ("one of n03, n17 is slow: no run had one without the other",)


def test_a_few_runs_do_not_make_a_node_slow_by_chance() -> None:
    false_alarms = sum(
        bool(judge_nodes(in_rounds({}, rounds=2, num_nodes=4, seed=seed), false_alarm_rate=0.05).slow)
        for seed in range(300)
    )
    assert false_alarms < 30


def test_failed_runs_and_runs_on_unknown_nodes_are_left_out_and_named() -> None:
    runs = [make_run(f"r{i}", 1 + i / 1000) for i in range(4)]
    runs[0] = replace(runs[0], verdict="failed", reasons=("died",))
    runs[1] = replace(runs[1], nodes=())
    found, notes = runs_on_nodes([*runs, runs[2]])
    assert [run.nodes for run in found] == [("node-r2",), ("node-r3",)]
    assert notes == ["1 run left out: failed", "the nodes of 1 run are unknown"]


def test_a_run_with_few_steps_has_not_failed() -> None:
    short = make_run("r0", 1.0, warmup_steps=8)
    found, notes = runs_on_nodes([short])
    assert (found, notes) == ([], ["1 run left out: 4 steps after the warm-up of 8; 5 are needed"])


def hosts_of(name: str, **facts: object) -> dict[str, object]:
    return {"names": [name], "facts": {"kernel": "6.8", "gpus": 4, **facts}, "odd": {}}


def test_the_odd_node_is_named_with_its_fact() -> None:
    runs = [make_run(f"r{i}", hosts=hosts_of(f"n{i}")) for i in range(4)]
    pair = {"names": ["n4", "n5"], "facts": {"kernel": "6.8", "gpus": 4}, "odd": {"n5": {"kernel": "5.15"}}}
    runs += [make_run("r4", hosts=pair), make_run("r5", hosts=hosts_of("n6", gpus=3))]
    assert odd_facts(runs) == [OddFact("n6", "gpus", "3", "4", 6), OddFact("n5", "kernel", "5.15", "6.8", 6)]
    assert not odd_facts(runs[:1])
    assert not odd_facts([runs[0], make_run("x", hosts=hosts_of("n9", kernel="5"))]), "of two, neither is odd"


def test_facts_from_a_damaged_log_say_nothing() -> None:
    wrong = [{}, {"names": "n1"}, {"names": [1, None, ""], "facts": {}}, {"names": ["n1"], "facts": [], "odd": 3}]
    assert odd_facts([make_run(f"r{i}", hosts=hosts) for i, hosts in enumerate(wrong)]) == []
