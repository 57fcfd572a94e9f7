"""`mbridge tune` with a system and a budget: the best layouts by prediction are a space, and few of them are run."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

SYSTEM = """name = "here"
scheduler = "local"
output_path = "{out}"
gpu_type = "h100"
python_executable = "{stand_in}"
"""
TUNE = ("tune", "--recipe", "llama3_8b", "--num-gpus", "8", "--launcher", "embedded")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    path = tmp_path / "system.toml"
    stand_in = Path(__file__).parents[1] / "stand_in" / "training.py"
    path.write_text(SYSTEM.format(out=tmp_path / "out", stand_in=stand_in))
    return path


def test_the_best_layouts_are_measured_within_the_budget(system: Path, tmp_path: Path, mbridge: Any) -> None:
    base = tmp_path / "base.toml"
    base.write_text(
        'name = "b"\ndescription = "d"\ntest_template_name = "MegatronBridge"\nextra_env_vars = {STAND_IN = "{}"}\n'
    )
    done = mbridge(*TUNE, "--system-config", system, "--max-trials", 2, "--base", base, "--max-steps", 20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 runs accepted" in done.stdout
    (path,) = (tmp_path / "out").glob("*/report.json")
    report = json.loads(path.read_text())
    (search,) = report["searches"]
    assert len(search["trials"]) == 2
    assert report["summary"]["success"] == sum(trial["runs"] for trial in search["trials"])
    assert search["trials"][0]["predicted_step_time_s"] == pytest.approx(
        min(trial["predicted_step_time_s"] for trial in search["trials"]), rel=0.05
    )
    winner = tomllib.loads((path.parent / search["best_definition"]).read_text())
    assert winner["cmd_args"]["model_recipe_name"] == "llama3_8b"
    assert winner["cmd_args"]["max_steps"] == 20
    assert winner["extra_env_vars"]["STAND_IN"] == "{}"


@pytest.mark.parametrize(
    "options",
    [
        ("--time-limit", "00:10:00"),
        ("--max-trials", "2"),
        ("--max-trials", "2", "--json", "--system-config", "{system}"),
    ],
    ids=["are for measuring give max", "give the system config to", "write and json are for"],
)
def test_what_does_not_go_together(system: Path, mbridge: Any, sentence: Sentence, options: tuple[str, ...]) -> None:
    done = mbridge(*TUNE, "--gpu", "h100", *(option.format(system=system) for option in options))
    assert done.returncode == 2
    sentence(done.stderr)
    assert "Traceback" not in done.stderr
