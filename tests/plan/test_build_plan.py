"""From a scenario to decided runs: placement, defaults, secrets, rejections and refusals."""

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch import render
from cloudai_mbridge.launch.write import plan_to_dict, write_plan, write_runs
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestScenario
from cloudai_mbridge.models.system import LocalSystem, System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.recipes.apply import refuse_hidden_steps
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

LOCAL = LocalSystem(name="here", scheduler="local")
SLURM4 = slurm_system(gpus_per_node=4)
ARGS: dict[str, Any] = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 2, "max_steps": 10}


def _plan(
    cmd_args: dict[str, Any] | None = None, system: System = LOCAL, run: dict[str, Any] | None = None, **keys: Any
) -> ScenarioPlan:
    definition = {"cmd_args": {**ARGS, **(cmd_args or {})}, **keys}
    return build_plan(loaded_scenario((run or {}, definition)), system)


def _one(*args: Any, **keys: Any) -> RunPlan:
    plan = _plan(*args, **keys)
    assert not plan.rejected
    (run,) = plan.runs
    return run


@pytest.mark.parametrize(
    ("system", "num_gpus", "num_nodes", "expected"),
    [
        (LOCAL, 4, None, (1, 4)),
        (SLURM4, 4, None, (1, 4)),
        (SLURM4, 8, None, (2, 4)),
        (SLURM4, 8, 4, (4, 2)),
        (SLURM4, 2, None, (1, 2)),
    ],
)
def test_ranks_are_placed(system: System, num_gpus: int, num_nodes: int | None, expected: tuple[int, int]) -> None:
    run = _one({"num_gpus": num_gpus, "gb": 32}, system, {"num_nodes": num_nodes})
    assert (run.num_nodes, run.ranks_per_node) == expected
    assert run.world_size == num_gpus


@pytest.mark.parametrize(
    ("options", "held"), [([], 8), (["--exclusive"], 16), (["--exclusive=user"], 8), (["--qos=high"], 8)]
)
def test_exclusive_jobs_hold_whole_nodes(options: list[str], held: int) -> None:
    system = SLURM4.model_copy(update={"extra_sbatch_args": options})
    assert _one({"num_gpus": 8, "gb": 32}, system, {"num_nodes": 4}).held_gpus == held


def test_iterations_are_runs_of_their_own() -> None:
    plan = _plan({"tp": [1, 2]}, run={"iterations": 3})
    assert [(run.label, run.iteration) for run in plan.runs] == [(f"tp{tp}", i) for tp in (1, 2) for i in range(3)]
    keys = [run.key for run in plan.runs]
    assert keys[:2] == ["t0/tp1/0", "t0/tp1/1"]
    assert len(set(keys)) == 6


def test_the_recipe_decides_what_the_user_left_open() -> None:
    run = _one({"mb": 2})
    assert (run.args["mb"], run.args["gb"], run.args["seq_length"]) == (2, 8, 64)
    assert run.recipe == "gpt_tiny"
    sizes = {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 8}
    assert run.training_config["train"].items() >= sizes.items()
    assert (run.num_steps, run.warmup_steps) == (10, 3)


def test_a_rule_sees_the_recipes_sizes() -> None:
    """gb = 8 comes from the recipe and is not a multiple of mb*dp = 6."""
    plan = _plan({"mb": 3})
    assert not plan.runs
    assert [violation.rule_id for violation in plan.rejected[0].violations] == ["C04"]
    assert dict(plan.rejected[0].violations[0].operands) == {"gb": 8, "mb": 3, "dp": 2}


def test_rejected_and_accepted_points_of_one_sweep() -> None:
    plan = _plan({"tp": [1, 2], "pp": [1, 2]})
    assert [run.label for run in plan.runs] == ["tp1-pp1", "tp1-pp2", "tp2-pp1"]
    (rejected,) = plan.rejected
    assert (rejected.test_id, rejected.label, dict(rejected.coordinates)) == ("t0", "tp2-pp2", {"tp": 2, "pp": 2})
    assert [violation.rule_id for violation in rejected.violations] == ["C01", "C03", "C04"]


@pytest.mark.parametrize(
    ("key", "text", "field"),
    [
        ("train.global_batch_size", "16", "gb"),
        ("model.seq_length", "32", "seq_length"),
        ("train.train_iters", "20", "max_steps"),
        ("model.tensor_model_parallel_size", "2", "tp"),
        ("optimizer.lr", "0.5", "lr"),
    ],
)
def test_what_is_reported_is_what_is_trained(key: str, text: str, field: str) -> None:
    """Rules, rates and verdicts look at `args`: an extra argument may not train something else behind their back."""
    section, name = key.split(".")
    with contextlib.suppress(BadInput):  # to refuse it is as good
        run = _one(extra_cmd_args={key: text})
        assert run.args.get(field) == run.training_config[section][name]


@pytest.mark.parametrize(
    ("key", "text", "launchers"),
    [
        ("logger.log_interval", "5", "embedded megatron_bridge"),
        ("++logger.log_interval", "2", "embedded megatron_bridge"),
        ("train.exit_interval", "4", "embedded megatron_bridge"),
        ("train.exit_duration_in_mins", "30", "embedded megatron_bridge"),
        ("train.iterations_to_skip", "[3]", "embedded megatron_bridge"),
        ("validation.skip_train", "true", "embedded megatron_bridge"),
        ("train.train_samples", "40", "embedded megatron_bridge"),
        ("logger.skip_train_metrics_log", "true", "megatron_bridge"),
        *(("train.train_iters", text, "megatron_bridge") for text in ("5", "11", "null", "${steps}")),
        *(("train.train_iters", "10", ""), ("+train.train_iters", "10", "")),
        *((key, text, "") for key, text in (("logger.log_interval", "1"), ("train.exit_interval", "10"))),
        *((key, text, "") for key, text in (("train.iterations_to_skip", "[]"), ("train.skip_train", "false"))),
    ],
)
def test_what_keeps_steps_out_of_the_log_is_refused(sentence: Sentence, key: str, text: str, launchers: str) -> None:
    """Such a run would train, and then fail since steps are missing."""
    for launcher in ("embedded", "megatron_bridge"):
        is_refused = launcher in launchers.split()
        with pytest.raises(BadInput) if is_refused else contextlib.nullcontext() as caught:
            refuse_hidden_steps({key: text}, 10, is_upstream=launcher == "megatron_bridge")
        if is_refused:
            sentence(caught)


def test_steps_of_different_sizes_are_refused(sentence: Sentence) -> None:
    """Tokens per second would be of the last ones, and the first ones count."""
    with pytest.raises(BadInput, match=r"train\.rampup_batch_size") as caught:
        _one(extra_cmd_args={"train.rampup_batch_size": "[4, 4, 40]"})
    sentence(caught)
    refuse_hidden_steps({"train.rampup_batch_size": "null"}, 10, is_upstream=False)
    with pytest.raises(BadInput, match=r"logger\.log_interval"):
        _one(extra_cmd_args={"logger.log_interval": "5"})


def test_environment_of_the_system_and_of_the_test() -> None:
    system = LOCAL.model_copy(update={"global_env_vars": {"A": "system", "B": True, "C": 5, "D": 0.5}})
    run = _one(system=system, extra_env_vars={"A": "test", "X": "y"})
    assert dict(run.env) == {"A": "test", "B": "True", "C": "5", "D": "0.5", "X": "y"}


@pytest.mark.parametrize(
    ("written", "seconds"), [("00:10:00", 600), ("10m", 600), ("1:30", 5400), ("1:30:00", 5400), (None, None)]
)
def test_a_time_limit_means_the_same_in_both_places(written: str | None, seconds: int | None) -> None:
    assert _one({"time_limit": written}).time_limit_s == seconds
    assert _one(run={"time_limit": written}).time_limit_s == seconds
    assert _one({"time_limit": written}, run={"time_limit": "7"}).time_limit_s == 420


def test_a_bad_time_limit_among_the_arguments(sentence: Sentence) -> None:
    assert _one({"time_limit": "5"}).time_limit == "5"
    with pytest.raises(ValueError) as caught:
        _plan({"time_limit": "soon"})
    sentence(caught)


def test_dependencies_by_kind() -> None:
    waits = [
        {"type": "start_post_comp", "id": "t0"},
        {"type": "start_post_init", "id": "t1"},
        {"type": "end_post_comp", "id": "t1"},
    ]
    keys = {"cmd_args": ARGS}
    plan = build_plan(loaded_scenario(({}, keys), ({}, keys), ({"dependencies": waits}, keys)), LOCAL)
    run = plan.runs[2]
    assert (run.after_completion, run.after_start, run.end_with) == (("t0",), ("t1",), ("t1",))


def test_mounts_of_the_definition_and_of_the_arguments() -> None:
    args = {"container_image": "image.sqsh", "custom_mounts": "/a:/b,/c:/d"}
    try:
        run = _one(args, SLURM4, extra_container_mounts=["/x:/y"])
    except AssertionError:
        (rejected,) = _plan(args, SLURM4).rejected
        assert "custom_mounts" in str(rejected.violations[0])
    else:
        assert run.container_mounts == ("/x:/y", "/a:/b", "/c:/d")


def test_names_that_are_no_directory_names_give_safe_keys() -> None:
    plan = _plan(run={"id": "../../x y"})
    key = Path(plan.runs[0].key)
    assert not key.is_absolute()
    assert ".." not in key.parts
    assert len(key.parts) == 3


def test_two_ids_that_look_alike_get_two_keys() -> None:
    keys = {"cmd_args": ARGS}
    plan = build_plan(loaded_scenario(({"id": "a b"}, keys), ({"id": "a_b"}, keys), ({"id": "a/b"}, keys)), LOCAL)
    assert len({run.key for run in plan.runs}) == 3


# Secrets

SECRET = "S3CRET"
SECRETS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"hf_token": SECRET}, {}, {}, "HF_TOKEN"),
    ({"wandb_key": SECRET}, {}, {}, "WANDB_API_KEY"),
    ({}, {"extra_env_vars": {"HF_TOKEN": SECRET}}, {}, "HF_TOKEN"),
    ({}, {"extra_env_vars": {"HF_TOKEN": SECRET, "NCCL_DEBUG": "WARN"}}, {}, "HF_TOKEN"),
    ({}, {"extra_env_vars": {"AWS_SECRET_ACCESS_KEY": SECRET}}, {}, "AWS_SECRET_ACCESS_KEY"),
    ({}, {}, {"global_env_vars": {"WANDB_API_KEY": SECRET}}, "WANDB_API_KEY"),
]


@pytest.mark.parametrize("system", [LOCAL, SLURM4], ids=["local", "slurm"])
@pytest.mark.parametrize(
    ("args", "keys", "of_system", "variable"),
    SECRETS,
    ids=["hf_token", "wandb_key", "env_alone", "env_beside_others", "aws", "global_env_vars"],
)
def test_a_secret_is_in_secret_env_and_nowhere_else(
    tmp_path: Path, system: System, args: dict[str, Any], keys: dict[str, Any], of_system: dict[str, Any], variable: str
) -> None:
    system = system.model_copy(update=of_system)
    plan = _plan(args, system, **keys)
    (run,) = plan.runs
    assert run.secret_env[variable] == SECRET
    assert SECRET not in repr(run).replace(repr(run.definition), "")
    assert SECRET not in json.dumps(plan_to_dict(plan))
    for name, text in render(run, system).items():
        assert SECRET not in text, name
    write_runs(plan, system, tmp_path)
    write_plan(plan, tmp_path)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(), path


@pytest.mark.parametrize("field", ["hf_token", "wandb_key"])
def test_a_rejected_point_keeps_its_secrets_too(field: str) -> None:
    plan = _plan({field: SECRET, "tp": 3})
    assert len(plan.rejected) == 1
    assert SECRET not in json.dumps(plan_to_dict(plan))


@pytest.mark.parametrize(
    "keys", [{"cmd_args": {**ARGS, "hf_token": ["a", "b"]}}, {"extra_env_vars": {"MY_TOKEN": ["a", "b"]}}]
)
def test_a_credential_is_no_axis(sentence: Sentence, keys: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        build_plan(loaded_scenario(({}, {"cmd_args": ARGS, **keys})), LOCAL)
    sentence(caught)


def test_a_word_with_token_in_it_is_no_credential() -> None:
    """Token dropping, tokenizers and token counts are not secrets: they may be swept, and they are recorded."""
    run = _one(extra_env_vars={"TOKENIZERS_PARALLELISM": "false"})
    assert run.env == {"TOKENIZERS_PARALLELISM": "false"}
    assert len(_plan(extra_env_vars={"TOKENIZERS_PARALLELISM": ["true", "false"]}).runs) == 2


def test_a_boolean_axis_with_token_in_its_name_is_judged_by_the_rules() -> None:
    plan = _plan({"use_tokendrop": [True, False]})
    assert [run.label for run in plan.runs] == ["use_tokendropfalse"]
    assert [point.label for point in plan.rejected] == ["use_tokendroptrue"]


# Refusals


@pytest.mark.parametrize(
    ("run", "keys", "scenario"),
    [
        ({}, {"cmd_args": {"model_recipe_name": "gpt_tiny"}}, {}),
        ({}, {"cmd_args": {"launcher": "embedded"}}, {}),
        ({}, {"cmd_args": ARGS, "agent": "bo"}, {}),
        ({}, {"cmd_args": ARGS, "env_params": {"tp": {}}}, {}),
        ({}, {"cmd_args": {**ARGS, "cuda_graph_scope": []}}, {}),
    ],
    ids=[
        "cmd args launcher megatron bridge",
        "cmd args model recipe name",
        "agent bo is unknown",
        "env params is not supported",
        "cmd args cuda graph scope",
    ],
)
def test_what_is_not_implemented_is_refused(
    sentence: Sentence, run: dict[str, Any], keys: dict[str, Any], scenario: dict[str, Any]
) -> None:
    with pytest.raises(BadInput) as caught:
        build_plan(loaded_scenario((run, keys), **scenario), LOCAL)
    sentence(caught)
    assert "\n" not in str(caught.value)


def test_every_refusal_gets_its_line() -> None:
    keys = {"cmd_args": {}, "agent": "bo", "env_params": {"tp": {}}}
    with pytest.raises(BadInput) as caught:
        build_plan(loaded_scenario(({}, keys), ({}, keys)), LOCAL)
    assert len(str(caught.value).splitlines()) == 6


def test_nsys_profiles_what_it_starts() -> None:
    assert _one(nsys={"enable": False}).profiler == ()
    assert _one(nsys={}).profiler == ("nsys", "profile", "-o", "nsys-%h")
    options = {"sample": "none", "output": "r", "trace": "cuda,nvtx", "force_overwrite": True, "extra_args": ["--a b"]}
    more = {"capture_range": "x", "capture_range_end": "stop", "cuda_graph_trace": "node", "gpu_metrics_devices": "0"}
    words = "nsys profile -s none -o r -t cuda,nvtx --force-overwrite=true --capture-range=x --capture-range-end=stop"
    assert _one(nsys=options | more).profiler == (
        *words.split(),
        *("--cuda-graph-trace=node", "--gpu-metrics-devices=0", "--a", "b"),
    )


def test_nsys_under_nemo_run_is_refused(sentence: Sentence) -> None:
    system = LocalSystem(name="here", scheduler="local", executor="nemo_run")
    with pytest.raises(BadInput) as caught:
        build_plan(loaded_scenario(({}, {"cmd_args": ARGS, "nsys": {}})), system)
    sentence(caught)


def test_what_has_no_effect_is_said() -> None:
    plan = _plan({}, predictor={"a": 1}, agent_steps=3)
    assert plan.notes == (
        "test 't0': agent_steps has no effect; [sweep] max_points limits the points",
        "test 't0': predictor has no effect",
    )


def test_cloudais_window_of_statistics(sentence: Sentence) -> None:
    assert _one({"max_steps": 9}, training_report={}).warmup_steps == 5
    assert _one({"max_steps": 9}, training_report={"exclude_start_steps": 1}).warmup_steps == 1
    assert _one({"max_steps": 9}, training_report={}, metrics={"warmup_steps": 2}).warmup_steps == 2
    assert _one({"max_steps": 1}).warmup_steps == 0  # nobody asked for more
    with pytest.raises(BadInput, match=r"training_report\.exclude_start_steps") as caught:
        _plan({"max_steps": 5}, training_report={})
    sentence(caught)


@pytest.mark.parametrize(("steps", "warmup", "runs"), [(4, 3, True), (3, 3, False), (2, 3, False), (1, 0, True)])
def test_a_step_must_be_left_after_the_warm_up(sentence: Sentence, steps: int, warmup: int, runs: bool) -> None:
    keys: dict[str, Any] = {"metrics": {"warmup_steps": warmup}}
    if runs:
        assert _one({"max_steps": steps}, **keys).num_steps == steps
        return
    with pytest.raises(BadInput, match=r"metrics\.warmup_steps") as caught:
        _plan({"max_steps": steps}, **keys)
    sentence(caught)


def test_an_unknown_recipe_is_bad_input(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        _plan({"model_recipe_name": "gpt_tinny"})
    sentence(caught)


def test_a_container_needs_a_system_that_starts_containers() -> None:
    """This machine runs the script as it is; a run that leaves the container out is not the run that was asked for."""
    with contextlib.suppress(BadInput):
        assert not _plan({"container_image": "nvcr.io#nvidia/nemo:26.02.00"}).runs


# The runner's limits


def test_the_limits_of_the_scenario_reach_the_plan() -> None:
    loaded = loaded_scenario(({}, {"cmd_args": ARGS}), runner={"retries": 0, "fail_fast": True, "hang_timeout_s": 60.0})
    plan = build_plan(loaded, LOCAL)
    assert (plan.runner.retries, plan.runner.fail_fast, plan.runner.max_parallel) == (0, True, None)
    assert [run.hang_timeout_s for run in plan.runs] == [60.0]
    assert _one().hang_timeout_s == 1800.0


@pytest.mark.parametrize(
    "runner",
    [
        *({name: 0} for name in ("max_parallel", "max_gpu_hours", "hang_timeout_s", "patience_s", "unknown_s")),
        *({"pre_test_timeout_s": 0}, {"retries": -1}, {"retires": 1}),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(runner: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(runner))):
        loaded_scenario(({}, {"cmd_args": ARGS}), runner=runner)


def test_a_budget_needs_time_limits(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"test 't0': runner\.max_gpu_hours") as caught:
        build_plan(loaded_scenario(({}, {"cmd_args": ARGS}), runner={"max_gpu_hours": 1.0}), LOCAL)
    sentence(caught)
    loaded = loaded_scenario(({"time_limit": "5"}, {"cmd_args": ARGS}), runner={"max_gpu_hours": 1.0})
    assert build_plan(loaded, LOCAL).runner.max_gpu_hours == 1.0


# What is written


def test_a_plan_is_strict_json_and_says_what_runs() -> None:
    plan = _plan({"tp": [1, 2], "mb": [1, 3]})
    data = json.loads(json.dumps(plan_to_dict(plan), allow_nan=False))
    assert (data["version"], data["scenario"], data["system"]) == (2, "s", "here")
    assert [run["key"] for run in data["runs"]] == [run.key for run in plan.runs]
    assert data["rejected"][0]["violations"][0]["message"].startswith("C04 cmd_args.gb: 8 is not divisible by mb*dp")


def test_a_point_can_be_run_again_from_its_own_definition() -> None:
    """test.toml of a point is a definition without lists that gives the same single run."""
    plan = _plan(
        {"tp": [1, 2], "lr": 0.01},
        extra_env_vars={"X": ["a b", "c"], "Y": "z"},
        extra_cmd_args={"model.qk_layernorm": "true"},
        metrics={"warmup_steps": 1},
    )
    assert len(plan.runs) == 4
    for run in plan.runs:
        data = tomllib.loads(render(run, LOCAL)["test.toml"])
        definition = TestDefinition.model_validate(data)
        scenario = TestScenario.model_validate({"name": "s", "Tests": [{"id": "t0", "test_name": "n"}]})
        (again,) = build_plan(LoadedScenario(scenario, [LoadedTest(scenario.tests[0], definition)]), LOCAL).runs
        assert again.label == "single"
        assert again.training_config == run.training_config
        assert (again.args, again.env, again.warmup_steps) == (run.args, run.env, 1)


@pytest.mark.parametrize("sweep", [{"include": [{"hf_token": "hf_S"}]}, {"exclude": [{"env.WANDB_API_KEY": "S"}]}])
def test_a_credential_is_no_coordinate(sentence: Sentence, sweep: dict[str, Any]) -> None:
    """It would name directories and jobs."""
    with pytest.raises(BadInput) as caught:
        build_plan(loaded_scenario(({}, {"cmd_args": ARGS, "sweep": sweep})), LOCAL)
    sentence(caught)


# Values of variables


def test_what_is_not_expanded_is_noted_by_key() -> None:
    env = {"A": "${B:-x}", "B": ["1", "`id`"], "C": "$HOME/${USER}:~/x", "D": r"\$(id)", "E": "$(hostname)"}
    system = LOCAL.model_copy(update={"global_env_vars": {"G": "$(id)", "H": "$HOME"}})
    plan = build_plan(
        loaded_scenario(({}, {"cmd_args": ARGS | {"launcher": "embedded"}, "extra_env_vars": env})), system
    )
    noted = [note.partition(": only $NAME")[0].split()[-1] for note in plan.notes if ": only $NAME" in note]
    assert noted == ["global_env_vars.G", "extra_env_vars.A", "extra_env_vars.B", "extra_env_vars.E"]


def test_a_variable_that_is_named_like_a_credential_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    env = {"SSH_KEY_FILE": "$HOME/.ssh/${WHICH}", "WHICH": "id", "MAX_TOKENS": r"\$5 $IN_THE_JOB", "KEYFILE": "~/k"}
    run = _one({"hf_token": "$MY_TOKEN"}, extra_env_vars=env)
    assert run.secret_env["SSH_KEY_FILE"] == "/home/me/.ssh/id"
    assert run.secret_env["MAX_TOKENS"] == "$5 $IN_THE_JOB"
    assert run.secret_env["KEYFILE"] == "/home/me/k"
    assert run.secret_env["HF_TOKEN"] == "$MY_TOKEN"
    monkeypatch.setenv("MY_TOKEN", "hf_x")
    assert _one({"hf_token": "$MY_TOKEN"}).secret_env["HF_TOKEN"] == "hf_x"


@pytest.mark.parametrize("keys", [{"run": {"iterations": 10**9}}, {"sweep": {"repeats": 10**9}}])
def test_more_runs_than_a_scenario_may_have(sentence: Sentence, keys: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        _plan(**keys)
    sentence(caught)


def test_runs_are_counted_over_all_tests(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr("cloudai_mbridge.plan.build.MOST_RUNS", 5)
    test = ({"iterations": 3}, {"cmd_args": ARGS})
    with pytest.raises(BadInput, match="test 't1':") as caught:
        build_plan(loaded_scenario(test, test), LOCAL)
    sentence(caught)
    assert len(build_plan(loaded_scenario(test), LOCAL).runs) == 3


def test_a_budget_ends_a_sweep_before_its_runs_are_planned(sentence: Sentence) -> None:
    plan = _plan(run={"iterations": 10**9, "time_limit": "10m"}, sweep={"max_gpu_hours": 1})
    assert plan.runs == ()
    assert "max_gpu_hours" in plan.notes[-1]
    sentence(plan.notes[-1])
