"""A sweep on this machine whose training is the stand-in: two points, and one that breaks a rule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
_SYSTEM = """name = "here"
scheduler = "local"
monitor_interval = 0.2
output_path = "{out}"
python_executable = "{stand_in}"
"""
_SCENARIO = """name = "first"

[[Tests]]
id = "layouts"
name = "layouts"
description = "d"
test_template_name = "MegatronBridge"
iterations = {iterations}
time_limit = "00:05:00"

[Tests.extra_env_vars]
STAND_IN = '{told}'

[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 20
gb = 8
mb = [2, 3, 4]
"""


def write_sweep(directory: Path, *, iterations: int = 1, **told: Any) -> None:
    """Write scenario.toml and system.toml. told: to the stand-in."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "system.toml").write_text(_SYSTEM.format(out=directory / "results", stand_in=STAND_IN))
    told = {"says_s": 0.5, "varies": 0.002, **told}
    (directory / "scenario.toml").write_text(_SCENARIO.format(iterations=iterations, told=json.dumps(told)))


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., mb.Scenario]:
    """Return a loaded sweep: sweep(iterations=2, exit=1)."""

    def load(**options: Any) -> mb.Scenario:
        write_sweep(tmp_path, **options)
        return mb.load(tmp_path / "scenario.toml", system=tmp_path / "system.toml")

    return load


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> mb.Run:
    """A sweep that was run, each point five times: as many as a baseline needs."""
    directory = tmp_path_factory.mktemp("swept")
    write_sweep(directory, iterations=5)
    return mb.load(directory / "scenario.toml", system=directory / "system.toml").plan().run()
