"""What was written is read back as it was, except for what no file may hold."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch.write import system_to_dict, write_plan, write_runs
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import LocalSystem, System
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.read import read_plan, read_plan_data
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

SECRET = "S3CRET \u00e9 'x"
EMBEDDED: dict[str, Any] = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 2, "max_steps": 10}
UPSTREAM: dict[str, Any] = {"model_family_name": "llama", "model_recipe_name": "llama3_8b", "num_gpus": 4}
REPOS = [{"url": "https://example.org/Megatron-Bridge.git", "commit": "v0.3.0", "mount_as": "/opt/Megatron-Bridge"}]
LOCAL = LocalSystem(name="here", scheduler="local")


def _plan(*tests: dict[str, Any], system: System, runner: dict[str, Any] | None = None) -> ScenarioPlan:
    """Plan tests given as keys of their definitions; a key "run" holds those of their entries."""
    pairs = [(keys.get("run", {}), {name: value for name, value in keys.items() if name != "run"}) for keys in tests]
    return build_plan(loaded_scenario(*pairs, runner=runner or {}), system)


def _as_read(plan: ScenarioPlan) -> ScenarioPlan:
    """Return what a reader knows of a plan: not what only the files of the runs need, nor rejected rows."""
    runs = tuple(replace(run, training_config={}, definition={}) for run in plan.runs)
    return replace(plan, runs=runs, rejected=())


def test_an_embedded_plan_comes_back(tmp_path: Path) -> None:
    waits = [{"type": "start_post_comp", "id": "t0"}, {"type": "end_post_comp", "id": "t0"}]
    plan = _plan(
        {"cmd_args": {**EMBEDDED, "tp": [1, 2], "mb": [1, 3]}, "extra_env_vars": {"A": "x y\n\u2028 '$(id)'"}},
        {
            "cmd_args": {**EMBEDDED, "lr": 1e-3, "wandb_key": ""},
            "run": {
                **{"dependencies": waits, "time_limit": "1-00:00:05", "nodes": ["n[1-2]", "n9"]},
                **{"exclude_nodes": ["n7"], "iterations": 2},
            },
            "metrics": {"warmup_steps": 1},
        },
        system=slurm_system(gpus_per_node=4),
        runner={"max_parallel": 3, "max_gpu_hours": None, "retries": 5, "fail_fast": True, "hang_timeout_s": 60.5},
    )
    assert plan.rejected
    assert len(plan.runs) == 4
    assert any(run.array for run in plan.runs)
    write_runs(plan, slurm_system(gpus_per_node=4), tmp_path)
    write_plan(plan, tmp_path)
    read = read_plan(tmp_path)
    assert read == _as_read(plan)
    assert (read.num_rejected, dict(read.rule_counts)) == (plan.num_rejected, dict(plan.rule_counts))
    assert (read.runner.retries, read.runner.hang_timeout_s) == (5, 60.5)


def test_a_plan_of_the_upstream_launcher_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = slurm_system(gpus_per_node=4, install_path=str(tmp_path / "install"))
    plan = _plan(
        {
            "cmd_args": {**UPSTREAM, "hf_token": SECRET, "container_image": "nvcr.io#nvidia/nemo:26.02"},
            "git_repos": REPOS,
            "extra_cmd_args": {"model.seq_length": "4096", "bare": ""},
        },
        system=system,
    )
    (run,) = plan.runs
    assert run.upstream is not None
    assert run.upstream.mounted
    (tmp_path / "root").mkdir()
    write_runs(plan, system, tmp_path / "root")
    write_plan(plan, tmp_path / "root")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    read = read_plan(tmp_path / "root")
    assert read.runs[0].upstream == run.upstream
    assert read == _as_read(plan)


def _with_secret(tmp_path: Path) -> ScenarioPlan:
    plan = _plan({"cmd_args": {**EMBEDDED, "hf_token": SECRET}}, {"cmd_args": EMBEDDED}, system=LOCAL)
    write_runs(plan, LOCAL, tmp_path)
    write_plan(plan, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "S3CRET" in path.read_text()]
    return plan


def test_secrets_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _with_secret(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    read = read_plan(tmp_path)
    assert [dict(run.secret_env) for run in read.runs] == [{"HF_TOKEN": SECRET}, {}]
    assert read == _as_read(plan)


def test_a_secret_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    _with_secret(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(BadInput) as caught:
        read_plan(tmp_path)
    sentence(caught)
    assert len(read_plan_data(tmp_path)["runs"]) == 2  # to look takes no credentials


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        '{"version": 2,',
        "[" * 100_000,
        "[]",
        "null",
        '{"version": 1, "runs": []}',
        '{"version": 3, "runs": []}',
    ],
    ids=["None", "case", "version 2", "100000", "case 2", "null", "version 1 runs", "version 3 runs"],
)
def test_what_is_no_plan(tmp_path: Path, sentence: Sentence, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BadInput) as caught:
        read_plan(tmp_path)
    sentence(caught, python=r"maximum recursion .*? characters\)")


@pytest.mark.parametrize("data", [b'{"version": 2}', b'{"version": 2, "runs": [{}]}', b'{"version": 2, "runs": 1}'])
def test_a_plan_that_lacks_a_part_is_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(BadInput):
        read_plan(tmp_path)


# The system

SYSTEMS: list[System] = [
    LOCAL,
    LocalSystem(name="l", scheduler="standalone", python_executable="/a b/'\"\\python", monitor_interval=0.5),
    slurm_system(),
    slurm_system(
        name="\u00e9 \"quoted\" 'x' \\ # $(id)",
        install_path="/install",
        output_path="out put",
        global_env_vars={"A": "x y", "B": True, "C": 5, "D": 0.5},
        gpus_per_node=4,
        executor="nemo_run",
        partitions=[
            {"name": "main", "nodes": ["n[1-2]", "n9"]},
            {"name": "other", "groups": [{"name": "g", "nodes": ["m1"]}, {"name": "h"}]},
        ],
        account="my team",
        mpi="pmix",
        distribution="block",
        extra_srun_args="--label --comment='a b'",
        extra_sbatch_args=["--exclusive", "--comment=x y"],
        extra_transient_status_errors=['Socket "timed" out'],
        cache_docker_images_locally=True,
        container_mount_home=True,
        monitor_interval=30,
    ),
]


@pytest.mark.parametrize("system", SYSTEMS, ids=["local", "standalone", "slurm", "full"])
def test_a_system_comes_back(tmp_path: Path, system: System) -> None:
    write_runs(ScenarioPlan("s", system.name, (), ()), system, tmp_path)
    write_plan(ScenarioPlan("s", system.name, (), ()), tmp_path)
    assert load_system(tmp_path / "system.toml") == system


def test_no_credential_of_a_system_is_written(tmp_path: Path) -> None:
    system = slurm_system(
        global_env_vars={"WANDB_API_KEY": SECRET, "A": "kept"},
        data_repository={"endpoint": "https://x", "token": SECRET},
        reports={"slack": {"secret": SECRET}},
    )
    write_runs(ScenarioPlan("s", system.name, (), ()), system, tmp_path)
    write_plan(ScenarioPlan("s", system.name, (), ()), tmp_path)
    assert "S3CRET" not in (tmp_path / "system.toml").read_text()
    read = load_system(tmp_path / "system.toml")
    assert read.global_env_vars == {"A": "kept"}
    assert (read.data_repository, read.reports) == (None, None)
    assert "S3CRET" not in json.dumps(system_to_dict(system))
