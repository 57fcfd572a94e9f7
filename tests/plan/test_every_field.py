"""Every key of system, scenario and test, with both launchers: it acts, is noted or is refused; none is silent.

A key is set to another value than its default in a small scenario. *job*: the scripts and configurations of its runs
change. *mbridge*: what mbridge itself plans, or reads while it runs, changes. *noted*, *refused*: a line names the key.
The results are docs/tables/keys.csv.
"""

import copy
import csv
import re
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch import render
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import Dependency, OnCompletion, RunnerConfig, TestRun, TestScenario
from cloudai_mbridge.models.system import LocalSystem, Partition, PartitionGroup, Prices, SlurmSystem
from cloudai_mbridge.models.test_definition import (
    GitRepo,
    MetricsConfig,
    NsysConfiguration,
    SweepConfig,
    TestDefinition,
    TrainingReportConfig,
)
from cloudai_mbridge.plan.build import build_plan

LIST = Path(__file__).parents[2] / "docs" / "tables" / "keys.csv"
BUILD = Path(__file__).parents[2] / "build" / "keys.csv"

SYSTEM: dict[str, Any] = {
    **{"name": "c", "scheduler": "slurm", "default_partition": "p", "gpus_per_node": 4, "install_path": "/i"},
    "partitions": [{"name": "p", "nodes": ["n[1-8]"]}, {"name": "q", "nodes": ["m1"]}],
}
LOCAL: dict[str, Any] = {"name": "here", "scheduler": "local"}
REPO = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.6.0"}
TEST: dict[str, Any] = {
    **{"name": "n", "description": "d", "test_template_name": "MegatronBridge", "git_repos": [REPO]},
    "cmd_args": {**{"gpu_type": "gb200", "num_gpus": 4, "max_steps": 10, "mb": 1, "gb": 8}, "time_limit": "1:00:00"},
}
EMBEDDED = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "container_image": "/image.sqsh"}
UPSTREAM = {
    **{"launcher": "megatron_bridge", "model_family_name": "llama", "model_recipe_name": "llama3_8b"},
    **{"offline": True, "tp": 1, "pp": 1, "cp": 1},
}
RUN = {"id": "t", "test_name": "n"}
OTHER_RUN = {"id": "other", "test_name": "n", "num_nodes": 1}
LAUNCHERS = ("embedded", "upstream")

# What mbridge itself reads while it plans, submits or reports, and no plan shows; the name is where
BY_MBRIDGE: dict[type[BaseModel], tuple[str, ...]] = {
    SlurmSystem: (
        *("output_path", "monitor_interval", "calibration", "prices", "partitions", "extra_transient_status_errors"),
        *("install_path", "job_name_prefix", "gpu_type", "executor"),
    ),
    LocalSystem: (
        *("output_path", "monitor_interval", "calibration", "prices", "warm_start", "install_path", "gpu_type"),
        *("executor", "scheduler", "gpus_per_node"),
    ),
    Partition: ("name", "nodes", "groups"),
    PartitionGroup: ("name", "nodes"),
    Prices: ("currency", "per_gpu_hour"),
    TestScenario: ("pre_test", "post_test"),
    TestRun: ("test_name",),
    TestDefinition: ("name", "description", "dse_excluded_args"),
    GitRepo: ("init_submodules",),
    SweepConfig: ("memory_share", "max_gpu_hours", "seed"),
}
OF_SYSTEM = {
    **{"name": "c2", "install_path": "/other", "output_path": "/o", "hf_home_path": "/hf", "monitor_interval": 3.0},
    **{"global_env_vars": {"A": "b"}, "gpus_per_node": 2, "gpu_type": "h100", "calibration": "x.toml"},
    **{"prices": {"gb200": 10.5}, "python_executable": "/py", "executor": "nemo_run", "data_repository": {"a": 1}},
    "reports": {"a": 1},
}
# Another value of each key; a function changes the whole of what is planned
VALUES: dict[type[BaseModel], dict[str, Any]] = {
    SlurmSystem: {
        **OF_SYSTEM,
        **{"scheduler": "local", "default_partition": "q", "partitions": [{"name": "p"}]},
        **{"account": "acc", "job_name_prefix": "x:", "distribution": "block", "mpi": "pmix", "ntasks_per_node": 4},
        **{"cache_docker_images_locally": True, "container_mount_home": True, "extra_srun_args": "--exact"},
        **{"extra_sbatch_args": ["--exclusive"], "extra_transient_status_errors": ["hiccup"]},
        **{"status_retry_pause_seconds": 3, "supports_gpu_directives_cache": False, "group_allocated": [1]},
    },
    LocalSystem: {**OF_SYSTEM, "scheduler": "standalone", "warm_start": False},
    Partition: {"name": "p2", "nodes": ["n1"], "groups": [{"name": "g", "nodes": ["n1"]}], "slurm_nodes": [1]},
    PartitionGroup: {"name": "g2", "nodes": ["n2"]},
    Prices: {"currency": "EUR", "per_gpu_hour": {"gb200": 1.0}},
    TestScenario: {
        **{"name": "s2", "tests": [RUN, OTHER_RUN], "job_status_check": False, "sol_path": "/s", "reports": {"a": 1}},
        **{"pre_test": "check", "post_test": "clean", "runner": {"retries": 0}},
    },
    RunnerConfig: {
        **{"max_parallel": 2, "max_gpu_hours": 5.0, "retries": 0, "fail_fast": True, "hang_timeout_s": 50.0},
        **{"pre_test_timeout_s": 5.0, "patience_s": 5.0, "settle_s": 5.0, "unknown_s": 5.0, "late_files_s": 5.0},
        "on_completion": {"command": ["/bin/true"]},
    },
    OnCompletion: {"command": ["/bin/false"], "webhook_env": "HOOK", "webhook_file": "/f"},
    TestRun: {
        **{"id": "t2", "test_name": None, "num_nodes": 2, "nodes": ["n[1-2]"], "exclude_nodes": ["n3"], "weight": 2},
        **{"segment": 1},
        **{"iterations": 2, "sol": 1.0, "ideal_perf": 2.0, "time_limit": "2:00:00", "extra_srun_args": "--exact"},
        "dependencies": [{"type": "start_post_comp", "id": "other"}],
    },
    Dependency: {"type": "end_post_comp", "id": "third"},
    TestDefinition: {
        **{"name": "n2", "description": "d2", "test_template_name": "NCCL", "extra_env_vars": {"A": "b"}},
        **{"cmd_args": {}, "extra_cmd_args": {"optimizer.adam_eps": "1e-9"}},
        **{"extra_container_mounts": ["/a:/b"], "git_repos": [{**REPO, "commit": "v0.3.0"}], "nemo_run_repo": REPO},
        **{"nsys": {"enable": True}, "metrics": {"warmup_steps": 1}, "training_report": {"exclude_start_steps": 1}},
        **{"sweep": {"repeats": 2}, "dse_excluded_args": ["cmd_args.detach"], "predictor": {"a": 1}, "agent": "tune"},
        **{"agent_steps": 3, "agent_metrics": ["a"], "agent_reward_function": "x", "agent_config": {"a": 1}},
        "env_params": {"a": 1},
    },
    GitRepo: {
        **{"url": "https://example.com/Megatron-Bridge.git", "commit": "v0.3.0", "mount_as": "/opt/Megatron-Bridge"},
        **{"init_submodules": True, "installed_path": "/x"},
    },
    NsysConfiguration: {
        **{"enable": False, "nsys_binary": "nsys2", "task": "launch", "output": "o", "sample": "cpu", "trace": "cuda"},
        **{"force_overwrite": True, "capture_range": "cudaProfilerApi", "capture_range_end": "stop"},
        **{"cuda_graph_trace": "node", "gpu_metrics_devices": "all", "extra_args": ["--stats=true"]},
    },
    MetricsConfig: {"warmup_steps": 1},
    TrainingReportConfig: {"exclude_start_steps": 1, "exclude_post_profiling_steps": 3},
    SweepConfig: {
        **{"zip": [["mb", "gb"]], "exclude": [{"mb": 1}], "include": [{"mb": 4, "gb": 8}]},
        **{"repeats": 2, "order": "random", "seed": 3, "max_points": 1, "max_gpu_hours": 5.0, "memory_share": 0.01},
    },
}
# Keys that only a change of the file's kind could change, or a file of its own
FIXED = ("scheduler", "calibration", "test_name")
# What stands beside a key in both scenarios
AXES = (("test", "cmd_args", "mb"), [1, 2]), (("test", "cmd_args", "gb"), [8, 16])
BESIDE: dict[str, tuple[tuple[tuple[Any, ...], Any], ...]] = {
    **dict.fromkeys(("zip", "exclude", "include", "order", "max_points", "max_gpu_hours"), AXES),
    "seed": (*AXES, (("test", "sweep", "order"), "random")),
    "agent_steps": (*AXES, (("test", "agent"), "tune")),
    "agent": AXES,
}
# The heading of a table, and where it stands: the file, and the keys on the way
TABLES: dict[type[BaseModel], tuple[str, tuple[Any, ...]]] = {
    SlurmSystem: ("System, Slurm", ("system",)),
    LocalSystem: ("System, this machine", ("system",)),
    Partition: ("[[partitions]]", ("system", "partitions", 0)),
    PartitionGroup: ("[[partitions.groups]]", ("system", "partitions", 0, "groups", 0)),
    Prices: ("[prices]", ("system", "prices")),
    TestScenario: ("Scenario", ("scenario",)),
    RunnerConfig: ("[runner]", ("scenario", "runner")),
    OnCompletion: ("[runner.on_completion]", ("scenario", "runner", "on_completion")),
    TestRun: ("[[Tests]]", ("scenario", "Tests", 0)),
    Dependency: ("[[Tests.dependencies]]", ("scenario", "Tests", 0, "dependencies", 0)),
    TestDefinition: ("Test", ("test",)),
    GitRepo: ("[[git_repos]]", ("test", "git_repos", 0)),
    NsysConfiguration: ("[nsys]", ("test", "nsys")),
    MetricsConfig: ("[metrics]", ("test", "metrics")),
    TrainingReportConfig: ("[training_report]", ("test", "training_report")),
    SweepConfig: ("[sweep]", ("test", "sweep")),
}
PLACES = {model: place for model, (_, place) in TABLES.items()}
KEYS = [
    (model, field)
    for model in PLACES
    for field, info in model.model_fields.items()
    if info.description is not None  # a test's keys in an entry of the scenario are those of the test
]


def files(model: type[BaseModel], launcher: str) -> dict[str, Any]:
    """Return a system, a scenario and a test in which a table is there."""
    args = {**TEST["cmd_args"], **(EMBEDDED if launcher == "embedded" else UPSTREAM)}
    runs = [dict(RUN), dict(OTHER_RUN), {**OTHER_RUN, "id": "third"}]
    data = copy.deepcopy(
        {"system": SYSTEM, "scenario": {"name": "s", "Tests": runs}, "test": {**TEST, "cmd_args": args}}
    )
    if model is LocalSystem:
        data["system"] = dict(LOCAL)
        del data["test"]["cmd_args"]["container_image"]
    around: dict[type[BaseModel], Any] = {
        PartitionGroup: {"name": "g", "nodes": ["n1"]},
        OnCompletion: {"command": ["/bin/true"]},
        Dependency: {"type": "start_post_comp", "id": "other"},
        NsysConfiguration: {"enable": True},
        TrainingReportConfig: {"exclude_start_steps": 3},
        SweepConfig: {"repeats": 3},
    }
    if model not in (SlurmSystem, LocalSystem, Partition, TestScenario, TestRun, TestDefinition, GitRepo):
        put(data, PLACES[model], around.get(model, {}))
    return data


def put(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set a value, with the tables on the way to it."""
    place: Any = data
    for key, following in pairwise(path):
        if isinstance(key, str) and key not in place:
            place[key] = [] if following == 0 else {}
        place = place[key]
    if path[-1] == 0 and not place:
        place.append(value)
    else:
        place[path[-1]] = value


def planned(data: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Return all that the runs' files hold, the notes, and the plan."""
    kind = SlurmSystem if data["system"]["scheduler"] == "slurm" else LocalSystem
    system = kind.model_validate(data["system"])
    scenario = TestScenario.model_validate(data["scenario"])
    tests = []
    for run in scenario.tests:
        merged = {**data["test"], **run.overrides()}
        tests.append(LoadedTest(run, TestDefinition.model_validate(merged)))
    plan = build_plan(LoadedScenario(scenario, tests), system)
    texts = [
        f"{name}\n{text}" for run in plan.runs for name, text in render(run, system).items() if name != "test.toml"
    ]
    known = {name: value for name, value in asdict(plan).items() if name != "notes"}
    for run in known["runs"]:
        del run["definition"], run["test_name"]
    return "".join(texts), plan.notes, repr(known)


def outcome(model: type[BaseModel], field: str, launcher: str) -> str:
    """Return what becomes of a key: job, mbridge, noted, refused or silent."""
    if model is LocalSystem and launcher == "upstream":
        return "refused"  # test_build_plan.py
    if field in FIXED:
        return "mbridge"
    before = files(model, launcher)
    for place, value in BESIDE.get(field, ()):
        put(before, place, value)
    after = copy.deepcopy(before)
    info = model.model_fields[field]
    value = VALUES[model][field]
    if field == "cmd_args":
        value = {**before["test"]["cmd_args"], "max_steps": 11}
    put(after, (*PLACES[model], info.alias or field), value)
    texts, notes, plan = planned_once(model, launcher, field if field in BESIDE else "", before)
    try:
        new_texts, new_notes, new_plan = planned(after)
    except (ValueError, BadInput) as error:  # pydantic's, or ours
        names_it = re.search(rf"\b{field}\b", str(error)) or str(VALUES[model][field]) in str(error)
        return "refused" if names_it else f"silent: {error}"
    if new_texts != texts:
        return "job"
    table = next((name for name in reversed(PLACES[model]) if isinstance(name, str)), "")
    names = rf"\b(?:{field}|{table})\b" if table in ("nsys", "git_repos") else rf"\b{field}\b"
    if any(re.search(names, note) for note in {*notes, *new_notes}):
        return "noted"
    return "mbridge" if new_plan != plan or field in BY_MBRIDGE.get(model, ()) else "silent"


def planned_once(
    model: type[BaseModel], launcher: str, beside: str, data: dict[str, Any]
) -> tuple[str, tuple[str, ...], str]:
    """Return what is planned without a key, once for all keys of a table."""
    if (model, launcher, beside) not in _PLANNED:
        _PLANNED[model, launcher, beside] = planned(data)
    return _PLANNED[model, launcher, beside]


_PLANNED: dict[tuple[type[BaseModel], str, str], tuple[str, tuple[str, ...], str]] = {}


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[type[BaseModel], str], tuple[str, ...]]:
    return {(model, field): tuple(outcome(model, field, launcher) for launcher in LAUNCHERS) for model, field in KEYS}


def test_no_key_is_silent(outcomes: dict[tuple[type[BaseModel], str], tuple[str, ...]]) -> None:
    known = ("job", "mbridge", "noted", "refused")
    silent = [(model.__name__, field, *found) for (model, field), found in outcomes.items() if not {*found} <= {*known}]
    assert silent == []


def test_the_list_is_of_these_results(outcomes: dict[tuple[type[BaseModel], str], tuple[str, ...]]) -> None:
    rows: list[tuple[str, ...]] = [("table", "key", *LAUNCHERS, "meaning")]
    for model in PLACES:
        for field in (field for known, field in KEYS if known is model):
            info = model.model_fields[field]
            rows.append((TABLES[model][0], info.alias or field, *outcomes[model, field], info.description or ""))
    BUILD.parent.mkdir(exist_ok=True)
    with BUILD.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    assert LIST.exists(), f"copy {BUILD} there"
    assert LIST.read_text(encoding="utf-8") == BUILD.read_text(encoding="utf-8"), f"stale; copy {BUILD} there"
