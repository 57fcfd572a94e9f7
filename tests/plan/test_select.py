"""Choice of points: by an expression, by an earlier run, refusals, and the points that are left out."""

from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, NothingFailed
from cloudai_mbridge.launch.write import write_plan
from cloudai_mbridge.models.loading import LoadedScenario
from cloudai_mbridge.models.system import LocalSystem, System
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.read import read_plan
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.plan.select import Selection, hooks_of
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

LOCAL = LocalSystem(name="here", scheduler="local")
SLURM = slurm_system(gpus_per_node=4)
ARGS: dict[str, Any] = {
    **{"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 2, "max_steps": 10},
    **{"tp": [1, 2], "mb": [1, 2, 3], "gb": 8},  # mb = 3 breaks C04
}
ENV = {"MODE": ["a[1]", "a1", "0.5"]}
SWEEP, OTHER = {"id": "sweep", "test_name": "n"}, {"id": "llama_large", "test_name": "n"}


def scenario(*tests: dict[str, Any], runs: tuple[dict[str, Any], ...] = (SWEEP, OTHER), **keys: Any) -> LoadedScenario:
    return loaded_scenario(*zip(runs, tests, strict=True), **keys)


def two_tests(**keys: Any) -> LoadedScenario:
    """A sweep over tp and mb with four accepted points, and one over an environment variable with three."""
    single = {**ARGS, "tp": 1, "mb": 1}
    return scenario({"cmd_args": ARGS, **keys}, {"cmd_args": single, "extra_env_vars": ENV})


def plan_of(*only: str, past: Selection | None = None, loaded: LoadedScenario | None = None) -> ScenarioPlan:
    return build_plan(loaded or two_tests(), LOCAL, selection=replace(past or Selection(), only=only))


def names(plan: ScenarioPlan) -> list[str]:
    return list(dict.fromkeys(f"{run.test_id}/{run.label}" for run in plan.runs))


ALL = [f"sweep/tp{tp}-mb{mb}" for tp in (1, 2) for mb in (1, 2)]


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        (["sweep"], ALL),
        (["sw*"], ALL),
        (["tp2-mb1"], ALL[2:3]),
        (["sweep/tp2-mb1"], ALL[2:3]),
        (["*tp2*"], ALL[2:]),
        (["tp=2"], ALL[2:]),
        (["tp=2.0, mb=[12]"], ALL[2:]),
        (["sweep,mb=1"], [ALL[0], ALL[2]]),
        (["tp=1,mb=1", "tp=2,mb=2"], [ALL[0], ALL[3]]),
        (["tp=*"], ALL),  # the other test has no such axis
    ],
)
def test_expressions_choose(only: list[str], chosen: list[str]) -> None:
    plan = plan_of(*only)
    assert names(plan) == chosen
    assert len(plan.left_out) == 7 - len(chosen)
    assert plan.tests == ("sweep",)


def modes(*only: str) -> list[str]:
    return [run.coordinates["env.MODE"] for run in plan_of(*only).runs]


def test_a_value_is_taken_before_a_wildcard() -> None:
    assert modes("env.MODE=a[1]") == ["a[1]"]
    assert modes("env.MODE=a[12]") == ["a1"]
    assert modes("env.MODE=a*") == ["a[1]", "a1"]


def test_texts_that_look_like_numbers_compare_as_texts(sentence: Sentence) -> None:
    assert modes("env.MODE=0.5") == ["0.5"]
    with pytest.raises(BadInput) as caught:
        modes("env.MODE=0.50")
    sentence(caught)


def test_a_name_is_taken_before_its_commas_and_wildcards() -> None:
    runs = ({"id": "a[1],tp=2", "test_name": "n"}, {"id": "a1", "test_name": "n"})
    loaded = scenario({"cmd_args": ARGS}, {"cmd_args": ARGS}, runs=runs)
    assert plan_of("a[1],tp=2", loaded=loaded).tests == ("a[1],tp=2",)
    assert names(plan_of("a[1],tp=2/tp1-mb1", loaded=loaded)) == ["a[1],tp=2/tp1-mb1"]
    assert names(plan_of("a[1],tp=1,mb=1", loaded=loaded)) == ["a1/tp1-mb1"]


@pytest.mark.parametrize(
    "only", ["", "tp=1,,mb=1", "=2", "tpp=2", "tp=4", "tp>=2", "llama_lrage", "mb=3", "tp=2,env.MODE=a1"]
)
def test_what_chooses_no_point_is_refused(sentence: Sentence, only: str) -> None:
    """Even if another expression chooses some."""
    with pytest.raises(BadInput) as caught:
        plan_of("sweep", only)
    sentence(caught)


def test_the_rest_is_named_and_survives_in_the_plan(tmp_path: Any) -> None:
    plan = plan_of("tp=2,mb=1", "llama_large,env.MODE=a1")
    reason = "does not match --only tp=2,mb=1 --only llama_large,env.MODE=a1"
    assert LeftOut("sweep", "tp1-mb1", reason) in plan.left_out
    assert [note for note in plan.notes if note.startswith("5 points left out: sweep/tp1-mb1, ")]
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path).left_out == plan.left_out


def test_limits_count_points_that_are_left_out(sentence: Sentence) -> None:
    """A choice never brings a point that the whole sweep would not run, and changes no label."""
    loaded = two_tests(sweep={"max_points": 3})
    assert names(plan_of("tp=2", loaded=loaded)) == ["sweep/tp2-mb1"]
    with pytest.raises(BadInput) as caught:
        plan_of("tp=2,mb=2", loaded=loaded)
    sentence(caught)


def test_a_test_that_is_left_out_is_not_expected_and_rejects_nothing() -> None:
    plan = plan_of("llama_large")
    assert (plan.tests, plan.rejected, plan.num_rejected, plan.rule_counts) == (("llama_large",), (), 0, {})
    assert plan_of("sweep").num_rejected == 2


def test_a_test_of_rejected_points_is_expected_if_chosen() -> None:
    loaded = scenario({"cmd_args": ARGS}, {"cmd_args": {**ARGS, "tp": 1, "mb": [3]}})
    assert plan_of("sweep", loaded=loaded).tests == ("sweep",)
    assert plan_of("*mb*", loaded=loaded).tests == ("sweep", "llama_large")


def test_a_dependency_that_is_left_out_is_noted() -> None:
    runs = (SWEEP, {**OTHER, "dependencies": [{"type": "start_post_comp", "id": "sweep"}]})
    loaded = scenario({"cmd_args": ARGS}, {"cmd_args": {**ARGS, "tp": 1, "mb": 1}}, runs=runs)
    notes = plan_of("llama_large", loaded=loaded).notes
    assert [note for note in notes if "'llama_large': depends on sweep, left out here" in note]


def test_arrays_hold_chosen_points_alone() -> None:
    plan = build_plan(two_tests(), SLURM, selection=Selection(("tp=2",)))
    assert [run.array_index for run in plan.runs] == [0, 1]
    (run,) = build_plan(two_tests(), SLURM, selection=Selection(("tp=2,mb=1",))).runs
    assert run.array == ""


# ---- by an earlier run


def past(*bad: str, good: tuple[str, ...] = (), of: str = "s") -> Selection:
    def key(name: str) -> tuple[str, str]:
        test_id, _, label = name.partition("/")
        return test_id, label

    return Selection((), "s_2026", of, frozenset(map(key, good)), {key(name): {"tp": 1} for name in bad})


def test_what_failed_and_what_never_ran_is_chosen() -> None:
    plan = plan_of(past=past(ALL[0], good=tuple(ALL[1:3])))
    assert names(plan)[:2] == [ALL[0], ALL[3]]
    assert len(plan.runs) == 5
    assert {point.reason for point in plan.left_out} == {"succeeded in s_2026"}
    assert all(point.has_succeeded for point in plan.left_out)


def test_both_choices_must_agree() -> None:
    assert names(plan_of("tp=1", past=past(ALL[0], good=tuple(ALL[1:])))) == [ALL[0]]
    with pytest.raises(NothingFailed, match="among --only tp=2"):
        plan_of("tp=2", past=past(ALL[0], good=tuple(ALL[1:])))


def test_nothing_failed() -> None:
    good = (*ALL, *(f"{run.test_id}/{run.label}" for run in plan_of("llama_large").runs))
    with pytest.raises(NothingFailed) as caught:
        plan_of(past=past(good=good))
    assert caught.value.exit_code == 18


def test_failed_points_that_are_gone_are_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match="sweep/tp8-mb1:") as caught:
        plan_of(past=past("sweep/tp8-mb1"))
    sentence(caught)
    with pytest.raises(BadInput, match="sweep/tp1-mb3"):  # rejected now
        plan_of(past=past("sweep/tp1-mb3"))
    assert names(plan_of("tp=2", past=past("sweep/tp8-mb1"))) == ALL[2:]  # which --only does not choose


def test_a_run_of_another_scenario_is_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        plan_of(past=past(of="other"))
    sentence(caught)


# ---- searches


def searched(selection: Selection, system: System = LOCAL) -> ScenarioPlan:
    loaded = scenario({"cmd_args": ARGS, "agent": "tune", "agent_steps": 4}, runs=(SWEEP,))
    return build_plan(loaded, system, selection=selection)


def test_a_search_is_among_the_chosen_points() -> None:
    plan = searched(Selection(only=("tp=2",)))
    assert names(plan) == ALL[2:]
    assert all(run.search is not None for run in plan.runs)
    assert sum(run.is_again for run in plan.runs) == 2
    assert [note for note in plan.notes if "the search is among the chosen 2 points" in note]


def test_what_a_search_did_not_try_has_not_failed(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        searched(past(ALL[0]))
    sentence(caught)


def test_tests_of_hooks_are_no_failed_points() -> None:
    """They always run, so that a failed one is not missed in the scenario."""
    runs: list[dict[str, Any]] = [
        {"test_id": "check", "is_gate": True},
        {"test_id": "one", "after_completion": []},
        {"test_id": "two", "after_completion": ["one"]},
        *({"test_id": name, "after_completion": ["one", "two"]} for name in ("clean", "report")),
    ]
    assert hooks_of(runs) == {"check", "clean", "report"}
