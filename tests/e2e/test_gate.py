"""The gate on real trainings: a baseline of five runs, the same again, and a sleep planted in the training step.

The cluster is a private Slurm, the training is the embedded loop, and the sleep a module that the interpreter loads
when it starts. On a shared CPU the step of a tiny model may take ten times as long as in the run before, so every run
sleeps a second per step, which makes that a small share, and the planted slowdown is another second.
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm
pytest.importorskip("torch")

POINT = "gated/single"
_SCENARIO = """
name = "gated"
[[Tests]]
id = "gated"
iterations = {iterations}
name = "gated"
description = "one point, several runs"
test_template_name = "MegatronBridge"
time_limit = "00:10:00"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 9
gb = 1
mb = 1
seq_length = 32
"""
# Loaded by every Python that finds it on its path: it puts a sleep in front of every training step
_PLANTED = """
import importlib.machinery, os, sys, time

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        train_step = module.train_step
        def slow(*args, **kwargs):
            time.sleep(float(os.environ["PLANTED_SLEEP_S"]))
            return train_step(*args, **kwargs)
        module.train_step = slow

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "cloudai_mbridge.training.train":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec

sys.meta_path.insert(0, Finder)
"""
_POLICY = """
name = "wide"
baseline = "baseline.toml"
min_runs = 3
[[metrics]]
name = "step_time_s"
margin = 0.2
tolerance = 0.6
[[metrics]]
name = "tflops_per_gpu"
follows = "step_time_s"
[[metrics]]
name = "loss_curve"
margin = 0.005
tolerance = 0.02
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate")
    (path / "planted").mkdir()
    (path / "planted" / "sitecustomize.py").write_text(_PLANTED)
    (path / "policy.toml").write_text(_POLICY)
    return path


@pytest.fixture(scope="module")
def results(mbridge: Any, repository: Path, cluster: Any, directory: Path) -> Callable[..., Path]:
    """Run the point a few times on the cluster, and return the run's directory."""

    def run(name: str, iterations: int, sleep_s: float = 2.0) -> Path:
        scenario, system, out = (directory / f"{name}{end}" for end in (".scenario.toml", ".system.toml", ""))
        scenario.write_text(_SCENARIO.format(iterations=iterations))
        env = f'PYTHONPATH = "{directory}/planted"\nPLANTED_SLEEP_S = {sleep_s}\n'
        system.write_text((repository / "systems/sandbox.toml").read_text() + env)
        options = ("--system-config", system, "--test-scenario", scenario, "--output-dir", out, "--max-parallel", 3)
        done = mbridge("run", *options, env=cluster.env, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        (root,) = out.iterdir()
        return root

    return run


@pytest.fixture(scope="module")
def baseline(mbridge: Any, results: Callable[..., Path], directory: Path) -> Path:
    path = directory / "baseline.toml"
    promoted = mbridge(
        *("baseline", "promote", results("before", 5), "--baseline", path, "--policy", directory / "policy.toml"),
        *("--reason", "the first five runs", "--by", "test", "--max-noise", "0.3", "--yes"),
    )
    assert promoted.returncode == 0, promoted.stdout + promoted.stderr
    return path


def gate(mbridge: Any, directory: Path, *results: Path) -> tuple[Any, dict[str, Any]]:
    """Gate results; return the process and the JSON."""
    files = ("--json", directory / "gate.json", "--junit", directory / "gate.xml", "--markdown", directory / "gate.md")
    done = mbridge("gate", *results, "--policy", directory / "policy.toml", *files)
    return done, json.loads((directory / "gate.json").read_text())


@pytest.mark.long
def test_the_same_again_is_green_and_a_planted_sleep_is_red(
    mbridge: Any, results: Callable[..., Path], baseline: Path, directory: Path
) -> None:
    assert baseline.read_text().count("run_id") == 5
    done, found = gate(mbridge, directory, results("same", 3))
    assert (done.returncode, found["verdict"]) in ((0, "pass"), (0, "improvement")), done.stdout
    done, found = gate(mbridge, directory, results("slow", 3, sleep_s=4.0))
    assert (done.returncode, found["verdict"], found["exit_code"]) == (10, "regression", 10), done.stdout
    (point,) = found["points"]
    metrics = {metric["metric"]: metric for metric in point["metrics"]}
    assert (point["point"], metrics["loss_curve"]["verdict"]) == (POINT, "pass")
    planted = metrics["step_time_s"]["value"] - metrics["step_time_s"]["baseline"]
    assert planted > 1.4, "what a busy machine adds comes on top"
    assert "3 runs against 5" in metrics["step_time_s"]["words"]
    assert "REGRESSION: 1 regression" in done.stdout
    assert "❌ regression" in (directory / "gate.md").read_text(encoding="utf-8")
    suites = ET.parse(directory / "gate.xml").getroot()
    failed = {case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None}
    assert failed == {"(the point)", "step_time_s"}
    assert (suites.get("tests"), suites.get("failures")) == ("4", "2")


def test_the_interpreter_of_the_tests_is_not_planted() -> None:
    assert not any(getattr(finder, "__name__", "") == "Finder" for finder in sys.meta_path)
