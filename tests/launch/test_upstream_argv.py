"""The upstream launcher's command line: every field, what is left out, and that bash leaves it alone."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch import render
from cloudai_mbridge.megatron_bridge.launcher_options import known_launchers
from cloudai_mbridge.megatron_bridge.release import image_path
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestScenario
from cloudai_mbridge.models.shell import launcher_word, shell_word
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.launcher_command import FLAGS, find_job_ids, launcher_argv
from tests.cases import every
from tests.golden import Sentence

NAMES = {"model_family_name": "qwen", "model_recipe_name": "some_recipe"}
REPO = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.3.0"}
REPO_PATH = "/inst/Megatron-Bridge__v0.3.0"
INLINE = {"id": "t", "name": "n", "description": "d", "test_template_name": "MegatronBridge"}
HEAD = [
    *("-p", "part", "-g", "gb200", "-hf", "HF_TOKEN", "-ng", "8", "-m", "qwen", "-mr", "some_recipe"),
    *("--detach", "false", "--save_config_filepath", "/nemo_run/configs/ConfigContainer.yaml"),
]
LOGGED = [
    "logger.tensorboard_dir=/nemo_run/tb_logs",
    "logger.log_timers_to_tensorboard=true",
    "logger.log_throughput_to_tensorboard=true",
    "logger.log_memory_to_tensorboard=true",
]


def _system(**keys: Any) -> SlurmSystem:
    data = {"name": "c", "scheduler": "slurm", "default_partition": "part", "partitions": [{"name": "part"}]}
    return SlurmSystem.model_validate({**data, "install_path": "/inst", **keys})


def _loaded(args: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **keys: Any) -> LoadedScenario:
    """Return a scenario of one test. run: its entry; by default, it defines the test itself."""
    entry = {**INLINE, **(run or {})}
    if "test_name" in entry:
        del entry["test_template_name"]
    scenario = TestScenario.model_validate({"name": "s", "Tests": [entry]})
    given = {name: value for name, value in {**NAMES, **(args or {})}.items() if value is not None}
    data = {"name": "n", "description": "d", "git_repos": [REPO], "cmd_args": given, **keys}
    return LoadedScenario(scenario, [LoadedTest(scenario.tests[0], TestDefinition.model_validate(data))])


def _plan(
    args: dict[str, Any] | None = None, system: System | None = None, run: dict[str, Any] | None = None, **keys: Any
) -> RunPlan:
    plan = build_plan(_loaded(args, run, **keys), system or _system())
    assert not plan.rejected
    return plan.runs[0]


def _argv(
    args: dict[str, Any] | None = None,
    system: SlurmSystem | None = None,
    run: dict[str, Any] | None = None,
    files: tuple[str, ...] = (),
    **keys: Any,
) -> list[str]:
    plan = _plan(args, system, run, **keys)
    return launcher_argv(plan, system or _system(), lambda path: str(path) in files)


def _added(args: dict[str, Any], **keys: Any) -> list[str]:
    """Return what the arguments add to the shortest command line."""
    rest = [*HEAD, *LOGGED]
    added = []
    for element in _argv(args, **keys):
        if rest and element == rest[0]:
            rest.pop(0)
        else:
            added.append(element)
    assert not rest
    return added


def test_the_shortest_command_line() -> None:
    """Defaults are not told of a test that the scenario defines, but for what is always told."""
    assert _argv() == [*HEAD, *LOGGED]


def test_of_a_test_by_name_the_defaults_are_told() -> None:
    """CloudAI writes such a definition out and reads it back, and then everything counts as set."""
    assert _argv(run={"test_name": "n"}) == [
        *("-p", "part", "-g", "gb200", "-c", "bf16", "--task", "pretrain", "-hf", "HF_TOKEN", "--max_retries", "1"),
        *("-ng", "8", "-vb", "false", "-m", "qwen", "-mr", "some_recipe", "--moe_a2a_overlap", "false", "-ms", "10"),
        *("--detach", "false", "--save_config_filepath", "/nemo_run/configs/ConfigContainer.yaml", *LOGGED),
    ]
    assert _plan(run={"test_name": "n"}).num_steps == 10


def _told(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# The shipped data of every launcher; the real parsers read all flags in tests/interop/test_arguments.py, and CloudAI's
# command lines are compared word by word in test_argv.py there
OPTIONS = {flag: option for known in known_launchers() for option in known.options.values() for flag in option.flags}
# Values of arguments that do not take 3, 0.125, true or a word, as a rule or the launcher wants them
VALUES: dict[str, Any] = {
    **{"task": "sft", "compute_dtype": "fp8_mx", "hidden_size": 64, "num_layers": 4, "cuda_graph_impl": "none"},
    **{"pipeline_model_parallel_layout": "Et|tL", "first_k_dense_replace": 1, "tp": 2, "pp": 2, "cp": 2, "ep": 4},
    **{"et": 1, "mb": 1, "gb": 16, "data": "mock", "tokenizer_type": "NullTokenizer", "packager": "none"},
    **{"optimizer_type": "adam", "moe_flex_dispatcher_backend": "None", "profiling_ranks": "0,1", "nsys_trace": "cuda"},
    **{"num_moe_experts": 64, "most_recent_k": -1, "peak_mem_clk": -1, "domain": "llm", "lr": 1e-05, "max_retries": 0},
    **{"log_dir": "/logs", "nemo_home": "/nemo", "c4_train_shards": 6, "dataset_paths": "a", "seq_length": 128},
}
# Arguments of another form -> (value, what it becomes)
FORMS: dict[str, tuple[Any, list[str]]] = {
    "time_limit": ("00:10:00", ["-t", "00:10:00"]),
    "container_image": ("nvcr.io#nvidia/nemo:1", ["-i", "nvcr.io#nvidia/nemo:1"]),
    "gpus_per_node": (8, ["-gn", "8"]),
    "cuda_graph_scope": ("['attn', \"mlp\"]", ["--cuda_graph_scope", "attn,mlp"]),
    "vp": (1, ["-vp", "None"]),
    "recompute_modules": ("[core_attn, 'moe_act']", ["--recompute_modules", "core_attn,moe_act"]),
    "nsys_extra_args": ("--cuda-event-trace=false", ["--nsys_extra_args=--cuda-event-trace=false"]),
    "fp8_recipe": ("mxfp8", ["mixed_precision.fp8_recipe=mxfp8"]),
}
# told by other means, and tested apart
ELSEWHERE = {"launcher", "custom_mounts", "detach", "hf_token", "wandb_key", "num_gpus", "nemorun_version"}
ELSEWHERE |= {"gpu_type", "save_config_filepath", "offline"}
ELSEWHERE |= {"model_family_name", "model_recipe_name", "num_distributed_optimizer_instances"}


def _value(name: str) -> Any:
    """Return a value that asks for an effect."""
    annotation = ResolvedCmdArgs.model_fields[name].annotation
    kinds = {get_args(kind)[0] if get_args(kind) else kind for kind in get_args(annotation) or (annotation,)}
    by_kind = True if bool in kinds else 3 if int in kinds else 0.125 if float in kinds else "a-word"
    return VALUES.get(name, by_kind)


@every("name", sorted(FLAGS))
def test_a_flag_is_a_launchers_option_for_the_same_thing(name: str) -> None:
    """Its long form is the argument's name, or that of the field that the argument sets."""
    place = ARGUMENTS[name].config or ARGUMENTS[name].config_extra or ""
    assert OPTIONS[FLAGS[name]].name in {name, place.rpartition(".")[2], "gpu" if name == "gpu_type" else name}


@every("name", sorted(ResolvedCmdArgs.model_fields.keys() - ELSEWHERE))
def test_a_field_alone(name: str) -> None:
    if name in FORMS:
        value, expected = FORMS[name]
    else:
        value, flag = _value(name), FLAGS[name]
        expected = [flag] if OPTIONS[flag].action == "store_true" else [flag, _told(value)]
    if name == "cuda_graph_scope":  # a rule wants its implementation, too
        args = {name: value, "cuda_graph_impl": "transformer_engine"}
        assert _added(args) == ["--cuda_graph_impl", "transformer_engine", *expected]
    else:
        assert _added({name: value}) == expected


def test_full_iteration_is_told_as_the_launchers_parser_takes_it() -> None:
    repo = {**REPO, "commit": "v0.6.0"}
    argv = _argv({"cuda_graph_impl": "full_iteration"}, git_repos=[repo])
    place = argv.index("--cuda_graph_impl")
    assert argv[place : place + 4] == ["--cuda_graph_impl", "local", "--cuda_graph_scope", "full_iteration"]


def test_mounts_variables_and_slurm_params_stand_where_the_table_has_them() -> None:
    repos = [{**REPO, "mount_as": "/m"}]
    argv = _argv(
        {"domain": "llm", "nsys_trace": "cuda", "config_variant": "v1"},
        system=_system(gpus_per_node=8),
        git_repos=repos,
        extra_env_vars={"A": "b"},
        extra_cmd_args={"x": "1"},
    )
    assert argv == [
        *(*HEAD[:8], "-gn", "8", "-cm", f"{REPO_PATH}:/m", "-cb", "export A=b", "--domain", "llm"),
        *(*HEAD[8:], "--nsys_trace", "cuda"),
        *("--additional_slurm_params", "gpus-per-node=8;gres=gpu:8", "-cv", "v1", *LOGGED, "x=1"),
    ]


@every(
    ("name", "value"),
    [
        *((name, False) for name in ("dryrun", "use_recipes", "enable_nsys", "packed_sequence", "head_only")),
        *((name, "") for name in ("log_dir", "container_image", "nemo_home", "cuda_graph_scope", "data")),
    ],
)
def test_what_is_off_or_empty_is_not_told(name: str, value: Any) -> None:
    assert _added({name: value}) == []


@every("path", ["/logs/%j", "logs/100%%", r"/a\b"])
def test_a_log_dir_that_slurm_would_expand_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match=r"cmd_args.log_dir: Slurm reads '(%j|%%|\\\\)'"):
        _plan({"log_dir": path})


def test_virtual_stages() -> None:
    assert _added({"pp": 2, "vp": 2, "gb": 16, "mb": 1})[:4] == ["-pp", "2", "-vp", "2"]


def test_lists_that_are_values() -> None:
    args = {"dataset_paths": ["a", "b c"], "profiling_ranks": [0, 8], "recompute_modules": ["moe_act"]}
    added = _added(args, dse_excluded_args=[f"cmd_args.{name}" for name in args])
    assert added == ["--recompute_modules", "moe_act", "--dataset_paths", "a", "b c", "--profiling_ranks", "0,8"]


def test_what_a_sweep_sets_is_told() -> None:
    assert _added({"tp": [2, 4], "enable_vboost": [False]}) == ["-vb", "false", "-tp", "2"]


def test_gpu_and_saved_configuration() -> None:
    argv = _argv({"gpu_type": "h100", "save_config_filepath": "/y"})
    assert argv[:4] == ["-p", "part", "-g", "h100"]
    assert argv[argv.index("--save_config_filepath") + 1] == "/y"
    assert "--save_config_filepath" not in _argv({"save_config_filepath": ""})


@every(("written", "told"), [("mx", "mxfp8"), ("fp8_cs", "tensorwise"), ("sc", "blockwise"), ("delayed", "delayed")])
def test_fp8_recipes_have_megatron_cores_names(written: str, told: str) -> None:
    assert _added({"fp8_recipe": written}) == [f"mixed_precision.fp8_recipe={told}"]


def test_a_cluster_without_gpus_as_gres_is_not_asked_for_them() -> None:
    system = _system(gpus_per_node=8, supports_gpu_directives_cache=False)
    assert "--additional_slurm_params" not in _argv(system=system)


def test_account_gpus_and_slurm_params() -> None:
    system = _system(account="me", gpus_per_node=4, extra_srun_args="--qos high --segment=2 --overlap --comment 'a b'")
    assert _argv(system=system, run={"exclude_nodes": ["n1", "n2"]}) == [
        *("-a", "me", *HEAD[:8], "-gn", "4", *HEAD[8:], "--additional_slurm_params"),
        "gpus-per-node=4;gres=gpu:4;exclude=n1,n2;qos=high;segment=2;overlap;comment=a b",
        *LOGGED,
    ]
    assert _slurm_params(run={"nodes": ["n3", "n[1-2]"], "exclude_nodes": ["n1"]}) == "nodelist=n2,n3"


def _slurm_params(**keys: Any) -> str:
    argv = _argv(**keys)
    return argv[argv.index("--additional_slurm_params") + 1]


def test_options_of_sbatch_reach_the_launchers_jobs(sentence: Sentence) -> None:
    options = ["--exclusive", "--reservation=r", "--qos high", "--comment=a b"]
    text = "exclusive;reservation=r;qos=high;comment=a b;constraint=x"
    assert _slurm_params(system=_system(extra_sbatch_args=options, extra_srun_args="--constraint=x")) == text
    with pytest.raises(BadInput, match="extra_sbatch_args:") as caught:
        _slurm_params(system=_system(extra_sbatch_args=["-q high"]))
    sentence(caught)


def test_the_tests_own_slurm_params_follow_the_systems() -> None:
    run = {"extra_srun_args": "--reservation=r --exclusive"}
    assert _slurm_params(system=_system(extra_srun_args="--qos high"), run=run) == "qos=high;reservation=r;exclusive"


def test_a_time_limit_is_written_in_full() -> None:
    for written, told in (("90", "01:30:00"), ("36:00:00", "1-12:00:00"), ("2-03", "2-03:00:00")):
        argv = _argv(run={"time_limit": written})
        assert argv[argv.index("-t") + 1] == told


def test_a_single_slurm_param_with_a_blank_is_kept_whole() -> None:
    assert _slurm_params(system=_system(extra_srun_args="--comment='a b'")) == "comment=a b;"


@every("args", ["-N 2", "--comment='a;b'", r"--comment='a\'"])
def test_what_the_launcher_cannot_pass_on_is_refused(sentence: Sentence, args: str) -> None:
    with pytest.raises(BadInput) as caught:
        _plan(system=_system(extra_srun_args=args))
    sentence(caught)


def test_mounts_are_the_users_and_the_repositories() -> None:
    repos = [{**REPO, "mount_as": "/opt/Megatron-Bridge"}, {"url": "x/other.git", "commit": "c"}]
    argv = _added({"custom_mounts": "/e:/f"}, git_repos=repos, extra_container_mounts=["/a:/b", " ", " /c:/d"])
    assert argv == ["-cm", f"/a:/b,/c:/d,/e:/f,{REPO_PATH}:/opt/Megatron-Bridge"]
    assert _added({}) == []


def test_variables_are_sorted_and_quoted_for_the_jobs_shell() -> None:
    system = _system(global_env_vars={"B": 1, "MY_TOKEN": "t0p"})
    env = {"A": "0,1", "C": "two words", "D_KEY": "t0p"}
    assert [e for e in _argv(system=system, extra_env_vars=env) if "export" in e] == [
        "export A=0,1",
        "export B=1",
        r"export C=two\ words",
    ]


def test_overrides_come_last_and_the_users_win() -> None:
    args = {"num_distributed_optimizer_instances": 2, "use_megatron_fsdp": True, "config_variant": "v1"}
    extra = {"model.x": "1", "bare": "", "~model.y": "a b"}
    own = ["ddp.num_distributed_optimizer_instances=2", "model.x=1", "bare", "~model.y=a b"]
    assert _argv(args, extra_cmd_args=extra)[-10:] == ["-cv", "v1", *LOGGED, *own]
    dropped = {"logger.tensorboard_dir": "/mine"}
    assert _argv(extra_cmd_args=dropped)[-4:] == ["logger.tensorboard_dir=/mine", *LOGGED[1:]]
    mine = {"ddp.num_distributed_optimizer_instances": "4"}
    assert _argv(args, extra_cmd_args=mine)[-1] == "ddp.num_distributed_optimizer_instances=4"


def test_credentials_are_told_by_their_variables_names() -> None:
    plan = _plan({"hf_token": " hf_s3cret ", "wandb_key": "w4ndb"})
    argv = launcher_argv(plan, _system(), lambda path: False)
    assert argv == [*HEAD[:6], "-wdk", "WANDB_API_KEY", *HEAD[6:], *LOGGED]
    assert plan.secret_env == {"HF_TOKEN": "hf_s3cret", "WANDB_API_KEY": "w4ndb"}
    for text in [*render(plan, _system()).values(), repr(plan)]:
        assert "s3cret" not in text
        assert "w4ndb" not in text


def test_a_run_without_network_names_no_token() -> None:
    """The launcher takes one of the two only."""
    argv = _argv({"offline": True})
    assert "-hf" not in argv
    assert "--offline" in argv


def test_images() -> None:
    """A file that is there, else the installed file, else the address."""
    url = "nvcr.io#nemo"
    installed = str(image_path(Path("/inst"), url))
    assert _image(url, installed) == installed
    assert _image(url) == url
    assert _image("/images/a.sqsh", "/images/a.sqsh") == "/images/a.sqsh"
    assert _image("./a.sqsh", "a.sqsh") == str(Path("a.sqsh").absolute())
    assert _image("/images/none.sqsh") == "/images/none.sqsh"


def _image(image: str, *files: str) -> str:
    argv = _argv({"container_image": image}, files=files)
    return argv[argv.index("-i") + 1]


@every(
    ("args", "keys", "expected"),
    [
        ({"model_family_name": None}, {}, "test 't': cmd_args.model_family_name"),
        ({"model_recipe_name": None}, {}, "test 't': cmd_args.model_recipe_name"),
        ({}, {"git_repos": []}, "test 't': git_repos:"),
        ({}, {"git_repos": [{"url": "x/y", "commit": "c"}]}, "test 't': git_repos:"),
        ({"nsys_trace": ["a"]}, {"dse_excluded_args": ["cmd_args.nsys_trace"]}, "cmd_args.nsys_trace"),
    ],
)
def test_what_is_missing_gets_one_line(
    sentence: Sentence, args: dict[str, Any], keys: dict[str, Any], expected: str
) -> None:
    with pytest.raises(BadInput) as caught:
        _plan(args, run={"test_name": "n"}, **keys)
    assert expected in str(caught.value)
    sentence(caught)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("system", [LocalSystem(name="l", scheduler="local"), _system(install_path=None)])
def test_systems_that_cannot_run_the_launcher(sentence: Sentence, system: System) -> None:
    with pytest.raises(BadInput) as caught:
        _plan(system=system)
    sentence(caught)


def test_a_repository_is_megatron_bridges_by_its_mount_too() -> None:
    plan = _plan(git_repos=[{"url": "/srv/fork", "commit": "c", "mount_as": "/opt/Megatron-Bridge/"}])
    assert plan.upstream is not None
    assert plan.upstream.megatron_bridge.url == "/srv/fork"


def test_steps_are_known_only_if_they_are_told(sentence: Sentence) -> None:
    assert _plan().num_steps is None  # the scenario defines the test
    assert _plan({"max_steps": 20}).num_steps == 20
    assert _plan({"max_steps": 3}).warmup_steps == 2
    with pytest.raises(BadInput, match=r"cmd_args\.max_steps") as caught:
        _plan({"max_steps": 0})
    sentence(caught)


def test_nodes_that_do_not_reach_the_launcher_are_said() -> None:
    loaded = _loaded(run={"test_name": "n", "num_nodes": 2})
    plan = build_plan(loaded, _system(gpus_per_node=8))
    assert (plan.runs[0].num_nodes, plan.runs[0].ranks_per_node) == (1, 8)
    assert "test 't': the upstream launcher takes 1 node for 8 GPUs; num_nodes = 2 does not reach it" in plan.notes
    assert not any("num_nodes" in note for note in build_plan(loaded, _system(gpus_per_node=4)).notes)


def test_a_scope_that_full_iteration_replaces_is_said() -> None:
    for scope, is_noted in (("attn", True), ("", False), ("full_iteration", False)):
        args = {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": scope}
        loaded = _loaded(args, {"test_name": "n"}, git_repos=[{**REPO, "commit": "v0.6.0"}])
        plan = build_plan(loaded, _system())
        assert any("cuda_graph_scope = 'attn' has no effect" in note for note in plan.notes) is is_noted


def test_a_point_can_be_run_again_from_its_own_definition() -> None:
    plan = _plan({"tp": [2, 4], "enable_vboost": True}, extra_cmd_args={"model.x": "1"}, extra_env_vars={"A": "b c"})
    data = tomllib.loads(render(plan, _system())["test.toml"])
    again = _plan(data.pop("cmd_args"), **{k: v for k, v in data.items() if k not in ("name", "description")})
    assert launcher_argv(again, _system()) == launcher_argv(plan, _system())


# Bash

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1)
DATA = TEXT.filter(lambda text: "$" not in text and not re.match("~(/|$)", text))


@pytest.mark.process
@settings(deadline=None, max_examples=60)
@given(DATA, DATA, DATA, TEXT)
def test_every_element_survives_bash_as_data(first: str, second: str, third: str, override: str) -> None:
    """The rendered script hands the launcher exactly the elements of its argv."""
    args = {"tokenizer_model": first, "wandb_project_name": second, "data": third}
    plan = _plan(args, extra_env_vars={"X": first}, extra_cmd_args={"model.x": override})
    assert _started(plan) == launcher_argv(plan, _system())


def _started(plan: RunPlan, **env: str) -> list[str]:
    """Return the arguments that the rendered script starts the launcher with."""
    script = render(plan, _system())["launcher.sh"]
    begin, end = script.index("  cd /inst"), script.index("\n) > ")
    command = script[begin:end].replace(
        'cd /inst/Megatron-Bridge__v0.3.0 && exec /inst/Run__main-venv/bin/python "$_mbridge_starter"', _PRINT
    )
    environment = {**os.environ, **env}
    done = subprocess.run(["bash", "-uc", command], env=environment, capture_output=True, check=True)
    started: list[str] = json.loads(done.stdout)[1:]
    return started


_PRINT = f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"


@pytest.mark.process
def test_names_of_variables_and_the_home_directory_are_expanded_on_the_command_line() -> None:
    args = {
        "nemo_home": "$HOME/nemo",
        "log_dir": "~/logs",
        "save_dir": "${DATA}/$UNSET/x",
        "dataset_root": "a~/$(id)`id`",
    }
    mounts = ["~/data:/data", "$DATA/x:/x"]
    plan = _plan(args, extra_container_mounts=mounts, extra_cmd_args={"model.x": "$DATA ~"})
    started = _started(plan, HOME="/home/me", DATA="/two words; id")
    assert "UNSET" not in os.environ
    options = dict(itertools.pairwise(started))
    assert options["-nh"] == "/home/me/nemo"
    assert options["-l"] == "/home/me/logs"
    assert options["--save_dir"] == "/two words; id//x"
    assert options["--dataset_root"] == "a~/$(id)`id`"
    assert options["-cm"] == "/home/me/data:/data,/two words; id/x:/x"
    assert started[-1] == "model.x=$DATA ~", "CloudAI quotes overrides"


@pytest.mark.process
def test_no_credential_is_expanded_on_the_command_line() -> None:
    plan = _plan({"wandb_experiment_name": "x-$HF_TOKEN", "save_dir": r"\$WANDB_API_KEY"})
    started = _started(plan, HF_TOKEN="hf_s3cret", WANDB_API_KEY="s3cret")
    options = dict(itertools.pairwise(started))
    assert (options["-wdj"], options["--save_dir"]) == ("x-$HF_TOKEN", "$WANDB_API_KEY")
    assert launcher_word("$MAX_TOKENS_") != "$MAX_TOKENS_"


def test_relative_paths_of_this_machine_are_from_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = {"log_dir": "logs", "nemo_home": "./nemo/$USER", "custom_mounts": "../c:/c", "save_dir": "kept/as/it/is"}
    argv = _argv(args, extra_container_mounts=["./data:/data:ro", "plain:/p", "$X/a:/a", " ", "/b:/b"])
    options = dict(itertools.pairwise(argv))
    assert (options["-l"], options["-nh"]) == (f"{tmp_path}/logs", f"{tmp_path}/nemo/$USER")
    mounts = [f"{tmp_path}/data:/data:ro", f"{tmp_path}/plain:/p", "$X/a:/a", "/b:/b", f"{tmp_path}/../c:/c"]
    assert options["-cm"] == ",".join(mounts)
    assert options["--save_dir"] == "kept/as/it/is", "a path of the container"


@pytest.mark.process
def test_a_directory_with_a_dollar_sign_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a$HOME").mkdir()
    monkeypatch.chdir(tmp_path / "a$HOME")
    started = _started(_plan({"log_dir": "logs"}))
    assert started[started.index("-l") + 1] == f"{tmp_path}/a$HOME/logs"


@pytest.mark.process
@settings(deadline=None, max_examples=60)
@given(DATA)
def test_a_variables_value_survives_the_launchers_two_shells(value: str) -> None:
    """The launcher writes the command between single quotes into a script, which bash runs; NeMo-Run escapes HTML."""
    command = f"export K={shell_word(value, in_single_quotes=True)}"
    assert not set("\"'&<>\n") & set(command)
    for script in (f"{command} ; printenv K", f"bash -c '{command} ; printenv K'"):
        done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
        assert done.stdout.decode() == value + "\n"


@pytest.mark.process
@every(
    ("written", "seen"),
    [
        ("", ""),
        ("x:${A}:$B", "x:one two:"),
        ("$A*$A", "one two*one two"),
        ("'$A'", "'one two'"),
        ('it\'s "one"', 'it\'s "one"'),
        (r"\$A", "$A"),
        ("$(echo pwned) `echo pwned` ${A:-pwned} $$ $1 ${", "$(echo pwned) `echo pwned` ${A:-pwned} $$ $1 ${"),
        ("$A; echo pwned", "one two; echo pwned"),
        ("~/cache", "/home/me/cache"),
        ("~/a b", "/home/me/a b"),
        ("~", "/home/me"),
        ("~root/x ~/y", "~root/x ~/y"),
    ],
)
def test_names_of_variables_are_expanded_and_nothing_else(written: str, seen: str) -> None:
    """In the launcher's job, between its single quotes, and in a script of ours, which has `set -u`."""
    for script in (
        f"bash -c 'export K={shell_word(written, in_single_quotes=True)} ; printenv K'",
        f"set -u; export K={shell_word(written)}; printenv K",
        f"set -u; printf '%s\\n' {launcher_word(written)}",
    ):
        env = {**os.environ, "A": "one two", "HOME": "/home/me"}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, check=True)
        assert done.stdout.decode() == seen + "\n"


@every(
    ("log", "ids"),
    [
        (b"Submitted batch job 17\n", ["17"]),
        (b"[INFO] - Job id: 2254311\n", ["2254311"]),
        (b"i.x/0 Job ID: 4\r\nagain\nsubmitted batch job 5\nJob id: 5", ["4", "5"]),
        (b"job identity 3, Job id: none\n\xff", []),
    ],
)
def test_job_ids_in_a_log(log: bytes, ids: list[str]) -> None:
    assert find_job_ids(log) == ids
