"""What arguments set around the training process, as upstream's launcher sets it."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.test_definition import NsysConfiguration
from cloudai_mbridge.plan.launchers import EMBEDDED, node_commands_of, profiler_of, variables_of
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.startup import variables
from cloudai_mbridge.training.startup.variables import DUMP, dump_variables
from tests.golden import Sentence

DEFAULT = (
    "nsys profile -s none -o nsys-%h -t cuda-sw,nvtx --force-overwrite=true --capture-range=cudaProfilerApi"
    " --capture-range-end=stop --cuda-graph-trace=node"
)


@pytest.mark.parametrize(
    ("args", "table", "expected"),
    [
        ({"enable_nsys": False}, None, ""),
        ({"enable_nsys": False}, {}, "nsys profile -o nsys-%h"),
        ({"enable_nsys": True}, None, f"{DEFAULT} --cuda-event-trace=false"),
        (
            {"nsys_trace": ["cuda", "nvtx"], "nsys_extra_args": "--a=1,-b", "profiling_gpu_metrics": True},
            {"output": "r", "sample": "cpu", "extra_args": ["-c d"]},
            "nsys profile -s cpu -o r -t cuda,nvtx --force-overwrite=true --capture-range=cudaProfilerApi"
            " --capture-range-end=stop --cuda-graph-trace=node --gpu-metrics-devices=all --a=1 -b"
            " --cuda-event-trace=false -c d",
        ),
        ({"export_nsys_sqlite": True}, {"enable": False}, f"{DEFAULT} --export=sqlite --cuda-event-trace=false"),
        (
            {"export_nsys_sqlite": True, "nsys_extra_args": ["--export", "json,sqlite"]},
            None,
            f"{DEFAULT} --export json,sqlite --cuda-event-trace=false",
        ),
    ],
)
def test_nsys(args: dict[str, Any], table: dict[str, Any] | None, expected: str) -> None:
    given = ResolvedCmdArgs.model_validate({"enable_nsys": True, **args})
    nsys = None if table is None else NsysConfiguration.model_validate(table)
    assert " ".join(profiler_of(nsys, given)) == expected


def test_clocks() -> None:
    given = ResolvedCmdArgs(enable_vboost=True, lock_gpu_freq=1500, peak_mem_clk=4752)
    assert node_commands_of(given) == (
        "sudo nvidia-smi boost-slider --vboost 1",
        "sudo nvidia-smi -lgc 1500",
        "sudo nvidia-smi -lmc 4752,4752",
    )
    assert node_commands_of(ResolvedCmdArgs(enable_vboost=False, peak_mem_clk=-1)) == ()


@pytest.mark.parametrize(
    ("gpu", "args", "expected"),
    [
        ("h100", {}, "4"),
        ("gb200", {}, "2"),
        ("b300", {"model_family_name": "qwen"}, "4,2"),
        ("b300", {"model_family_name": "llama"}, "4"),
        ("b300", {"model_family_name": "llama", "task": "sft"}, "4,2"),
        ("b300", {"model_recipe_name": "deepseek_v3"}, "4"),
        ("b300", {"model_recipe_name": "deepseek_v3", "config_variant": "large_scale"}, "4,2"),
        ("b300", {"model_recipe_name": "nemotron_3_super"}, "4"),
    ],
)
def test_cores(gpu: str, args: dict[str, Any], expected: str) -> None:
    given = ResolvedCmdArgs.model_validate({"enable_pct_binding": True, **args})
    assert variables_of(given, gpu) == {variables.BINDING: expected}


def test_variables_and_mounts() -> None:
    given = ResolvedCmdArgs(nemo_home="/cache", offline=True, dump_env=True)
    assert variables_of(given, "h100") == {"NEMO_HOME": "/cache", "HF_HUB_OFFLINE": "1", DUMP: "1"}
    assert EMBEDDED.mounts(given) == ("/cache:/cache",)
    assert variables_of(ResolvedCmdArgs(offline=False, enable_pct_binding=False), "h100") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", ["--cpunodebind=1", "--membind=1"]), ("2,2", ["--cpunodebind=2", "--membind=2", "-C", "80,81"])],
)
def test_a_rank_is_bound(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(variables.shutil, "which", lambda name: name)
    monkeypatch.setattr(variables.os, "execvp", lambda name, words: started.append(words))
    env = {variables.BINDING: text, "LOCAL_RANK": "5"}
    variables.bind(env, ["python", "-m", "x"])
    assert started == [["numactl", *expected, "python", "-m", "x"]]
    assert env == {"LOCAL_RANK": "5"}, "it would be bound again"
    variables.bind(env, [])
    assert len(started) == 1


def test_a_rank_that_cannot_be_bound_does_not_train(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr(variables.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        variables.bind({variables.BINDING: "4"}, [])
    sentence(caught)
    with pytest.raises(ConfigError) as caught:
        variables.bind({variables.BINDING: "0"}, [])
    sentence(caught)


def test_the_environment_is_written_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {DUMP: "1", "SLURM_JOB_ID": "17", "HF_TOKEN": "n0ttobeseen", "A": "b\nc"}
    env |= {"PWD": "/", "OLDPWD": "/data/Ünï=1/My Runs", "DB_PWD": "/n0ttobeseen"}
    dump_variables({**env, "RANK": "1"})
    dump_variables({**env, DUMP: ""})
    assert os.listdir() == []
    dump_variables({**env, "RANK": "0"})
    text = Path("env_17.log").read_text()
    assert "n0ttobeseen" not in text
    assert "A='b\\nc'\n" in text
    assert "\nPWD='/'\n" in text
    assert "OLDPWD='/data/Ünï=1/My Runs'\n" in text
    assert stat.S_IMODE(os.stat("env_17.log").st_mode) == 0o600
