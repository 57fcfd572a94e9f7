"""A test of the embedded loop that leaves everything open: every command uses the same values, as if written out."""

import json
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge.files.documents import render_toml

HEAD = {"launcher": "embedded", "gpu_type": "h100", "model_family_name": "llama", "model_recipe_name": "llama3_8b"}
SIZES = {"tp": 1, "pp": 1, "cp": 2, "mb": 1, "seq_length": 8192}
BATCH = {8: 128, 16: 256}
NOTE = "defaults of Megatron-Bridge 0.6.0 (the newest known release): llama3_8b pretrain h100 bf16"


@pytest.fixture
def options(repository: Path, tmp_path: Path) -> list[str | Path]:
    """Return the options of two tests with the same points, one of which leaves them open."""
    tests = {
        "open": {"cmd_args": {**HEAD, "num_gpus": list(BATCH)}},
        "written": {
            "cmd_args": {**HEAD, **SIZES, "num_gpus": list(BATCH), "gb": list(BATCH.values())},
            "sweep": {"zip": [["num_gpus", "gb"]]},
        },
    }
    head = {"description": "", "test_template_name": "MegatronBridge"}
    runs = [{"id": name, "name": name, **head, **test} for name, test in tests.items()]
    (tmp_path / "scenario.toml").write_text(render_toml({"name": "s", "Tests": runs}))
    return ["--system-config", repository / "systems/h100.toml", "--test-scenario", tmp_path / "scenario.toml"]


def test_the_plan_and_the_files_of_the_run(mbridge: Any, options: list[str | Path], tmp_path: Path) -> None:
    done = mbridge("dry-run", *options, "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"note: test 'open': {NOTE}\n" in done.stdout
    assert done.stdout.count(NOTE) == 1  # nothing is filled in where all is written
    (plan,) = (tmp_path / "out").glob("*/plan.json")
    runs = {run["key"]: run for run in json.loads(plan.read_text())["runs"]}
    assert len(runs) == 4
    for key, run in runs.items():
        num_gpus = run["args"]["num_gpus"]
        expected = {**SIZES, "gb": BATCH[num_gpus]}
        assert {name: run["args"][name] for name in expected} == expected
        training = json.loads((plan.parent / key / "training.json").read_text())
        written = f"written/num_gpus{num_gpus}-gb{BATCH[num_gpus]}/0"
        assert training == json.loads((plan.parent / written / "training.json").read_text())
        script = (plan.parent / key / "job.sbatch").read_text()
        assert '[ "${CUDA_DEVICE_MAX_CONNECTIONS+set}" ] || export CUDA_DEVICE_MAX_CONNECTIONS=1\n' in script
        assert run["recipe_env"] == runs[written]["recipe_env"]


def test_the_predictions(mbridge: Any, options: list[str | Path]) -> None:
    plan = json.loads(mbridge("sweep", "plan", *options, "--json", "--show", "5").stdout)
    needs = {
        test["test_id"]: {point["coordinates"]["num_gpus"]: point["needs"] for point in test["examples"]}
        for test in plan["tests"]
    }
    assert needs["open"] == needs["written"]
    for num_gpus, gb in BATCH.items():
        point = ("estimate", "--recipe", "llama3_8b", "--gpu", "h100", "--num-gpus", num_gpus, "--launcher", "embedded")
        found = json.loads(mbridge(*point, "--json").stdout)
        layout = found["layout"]
        assert (layout["tp"], layout["pp"], layout["cp"], layout["mbs"], layout["gbs"]) == (1, 1, 2, 1, gb)
        assert found["memory"]["peak_memory_gib"] == pytest.approx(needs["open"][num_gpus]["peak_memory_gib"])
        if num_gpus == 16:
            ranked = mb.rank_layouts("llama3_8b", num_gpus=16, gpu="h100", launcher="embedded", top=20)
            (same,) = [one for one in ranked.best if {n: one.cmd_args[n] for n in SIZES} == SIZES]
            assert same.cmd_args["gb"] == gb
            assert same.headline.step_time_s == pytest.approx(needs["open"][16]["step_time_s"])


@pytest.mark.parametrize(("point", "words"), [("num_gpus=8", "gb=128"), ("num_gpus=16", "gb=256")])
def test_explain_says_what_is_filled_in(mbridge: Any, options: list[str | Path], point: str, words: str) -> None:
    lines = mbridge("sweep", "explain", *options, "open", point, "--include-oom-risk").stdout.splitlines()
    (line,) = [line for line in lines if "filled in by" in line]
    assert "filled in by preset llama3_8b pretrain h100 bf16, 0.6.0 (the newest known release): cp=2, " in line
    assert words in line


def test_a_violation_says_which_operands_are_the_presets(
    mbridge: Any, options: list[str | Path], tmp_path: Path
) -> None:
    text = (tmp_path / "scenario.toml").read_text()
    (tmp_path / "scenario.toml").write_text(text.replace('launcher = "embedded"', 'launcher = "embedded"\ntp = 3', 1))
    done = mbridge("sweep", "explain", *options, "open", "num_gpus=16")
    assert done.returncode == 1
    assert "tp=3, pp=1 (preset llama3_8b pretrain h100 bf16, 0.6.0), cp=2 (preset" in done.stdout
