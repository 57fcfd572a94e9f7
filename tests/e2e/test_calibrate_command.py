"""`mbridge calibrate`, and what its file changes, as a user calls them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from tests.cases import every
from tests.golden import Sentence

SYSTEM = 'name = "c"\nscheduler = "local"\ngpu_type = "h100"\ncalibration = "h100.toml"\n'
SCENARIO = """name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "llama3_8b"
compute_dtype = "bf16"
num_gpus = 8
gb = 128
tp = [2, 4]
"""
ESTIMATE = ("estimate", "--recipe=llama3_8b", "--num-gpus=8", "--gbs=128", "--mbs=1", "--tp=2", "--json")


def write_table(path: Path, factor: float) -> Path:
    """Write layouts whose steps all take so much longer than predicted."""
    gpu, rows = gpu_named("h100"), []
    for num_gpus in (8, 16, 32):
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2)):
            layout = ParallelLayout(num_gpus=num_gpus, mbs=1, gbs=128, tp=tp, pp=pp, seq_length=8192)
            model = architecture(load_recipe("llama3_8b"), ResolvedCmdArgs(tp=tp, seq_length=8192))
            seconds = factor * time_model(model, gpu, Precision.BF16).step_time_s(layout)
            sizes = {"gbs": 128, "mbs": 1, "seq_length": 8192, "tp": tp, "pp": pp, "cp": 1, "vp": 1, "ep": 1}
            rows.append({"gpu": "h100", "recipe": "llama3_8b", "num_gpus": num_gpus, **sizes, "step_time_s": seconds})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def system(tmp_path: Path, mbridge: Any) -> Path:
    """A system that is calibrated on a cluster at two thirds of the expected speed."""
    table = write_table(tmp_path / "measured.csv", 1.5)
    done = mbridge("calibrate", table, "--output", tmp_path / "h100.toml")
    assert done.returncode == 0, done.stderr
    assert "12 measured points of h100" in done.stdout
    assert "33.3% before" in done.stdout
    path = tmp_path / "system.toml"
    path.write_text(SYSTEM)
    return path


def test_predictions_use_the_calibration_and_say_so(system: Path, tmp_path: Path, mbridge: Any) -> None:
    shipped = json.loads(mbridge(*ESTIMATE, "--gpu=h100").stdout)
    found = json.loads(mbridge(*ESTIMATE, "--system-config", system).stdout)
    assert found["step_time_s"] == pytest.approx(1.5 * shipped["step_time_s"], rel=0.05)
    assert "on 12 measured points, held out" in found["step_time_error"]
    assert "published row" in shipped["step_time_error"]
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO)
    plan = mbridge("sweep", "plan", "--system-config", system, "--test-scenario", scenario)
    assert f"predictions for h100 are calibrated: {system.parent / 'h100.toml'}" in plan.stdout
    assert "12 measured points" in plan.stdout
    scenario.write_text(SCENARIO.replace("num_nodes", 'agent = "tune"\nnum_nodes'))
    out = tmp_path / "out"
    done = mbridge("dry-run", "--system-config", system, "--test-scenario", scenario, "--output-dir", out)
    assert done.returncode == 0, done.stderr
    (planned,) = out.glob("*/plan.json")
    assert {run["search"]["is_calibrated"] for run in json.loads(planned.read_text())["runs"]} == {True}
    best = mbridge("tune", "--recipe=llama3_8b", "--num-gpus=8", "--system-config", system, "--top=1")
    assert "on 12 measured points, held out" in best.stdout


def test_another_gpu_is_predicted_as_before(system: Path, mbridge: Any) -> None:
    for options in ((), ("--system-config", system)):
        found = json.loads(mbridge(*ESTIMATE, "--gpu=gb200", *options).stdout)
        assert "published row" in found["step_time_error"]


def test_points_that_are_predicted_well_change_nothing(tmp_path: Path, mbridge: Any) -> None:
    done = mbridge("calibrate", write_table(tmp_path / "measured.csv", 1.0), "--json")
    found = json.loads(done.stdout)
    assert not found["is_better"]
    assert set(found["step_time"].values()) == {1.0}


@every("text", [None, "version = 1", "version = 2", "gpu = "])
def test_a_file_that_is_no_calibration(tmp_path: Path, mbridge: Any, sentence: Sentence, text: str | None) -> None:
    (tmp_path / "system.toml").write_text(SYSTEM)
    if text is not None:
        (tmp_path / "h100.toml").write_text(text)
    done = mbridge(*ESTIMATE, "--system-config", tmp_path / "system.toml")
    assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (2, "BadInput")
    sentence(done.stderr)


def test_times_in_milliseconds_are_doubted(tmp_path: Path, mbridge: Any) -> None:
    done = mbridge("calibrate", write_table(tmp_path / "measured.csv", 1500.0))
    assert done.returncode == 0, done.stderr
    assert "check the GPU, and that they are in seconds" in done.stdout
    assert "in seconds" not in mbridge("calibrate", write_table(tmp_path / "measured.csv", 1.5)).stdout


def test_what_calibrate_refuses(tmp_path: Path, mbridge: Any) -> None:
    table = write_table(tmp_path / "measured.csv", 1.5)
    lines = table.read_text().splitlines()
    (tmp_path / "few.csv").write_text("\n".join(lines[:4]))
    mixed = [*lines, *(line.replace("h100", "gb200") for line in lines[1:])]
    (tmp_path / "mixed.csv").write_text("\n".join(mixed))
    refusals = {
        (tmp_path / "few.csv",): "3 measured points of h100; at least 5 are needed",
        (tmp_path / "mixed.csv",): "there are points of h100, gb200; say which with --gpu",
        (table, "--gpu", "b200"): "there are no points of b200, but of h100",
        (table, "--output", table): "exists; name another file",
        (tmp_path / "nowhere",): "nowhere",
    }
    for args, words in refusals.items():
        done = mbridge("calibrate", *args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert words in done.stderr
