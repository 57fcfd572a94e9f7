"""agent = "tune" in the real CloudAI: it finds the agent by its entry point, which then chooses among the points."""

import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cloudai.configurator.base_agent import BaseAgentConfig
from cloudai.core import Registry, TestRun

from cloudai_mbridge.tune.cloudai_agent import TuneAgent
from tests.interop.test_cloudai import CACHED, registered, status_of, trajectory_of

SPACE = "gb = [2, 4, 6, 8]\nmb = [1, 2, 4]\nseq_length = [32, 64]"
__all__ = ["registered"]


@pytest.mark.slurm
def test_the_agent_tries_as_many_points_as_it_may(cluster_place: Any) -> None:
    cluster_place.write(SPACE, head='agent = "tune"\nagent_steps = 3')
    ended = cluster_place.run("run", CACHED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert status_of(ended) == {"PASSED": 3, "FAILED": 0}
    actions = [row["action"] for row in trajectory_of(cluster_place)]
    assert len({tuple(action.items()) for action in actions}) == 3
    assert all(action["gb"] % action["mb"] == 0 for action in actions)  # no step is spent on what a rule rejects


def test_cloudai_lists_it(place: Any) -> None:
    assert Registry().get_agent("tune") is TuneAgent
    assert '"tune" class=TuneAgent' in place.call("list", "agents").stdout


class Env:
    """A space of CloudAI's, on a workload that is not ours; of its points, x = 4 is the best."""

    runner = SimpleNamespace(system=None)

    def __init__(self, steps: int) -> None:
        test = SimpleNamespace(agent_steps=steps, test_template_name="NcclTest")
        self.test_run = SimpleNamespace(test=test, name="t")

    def define_action_space(self) -> dict[str, list[Any]]:
        return {"x": [1, 2, 4, 8, 16], "y": ["a", "b", "c"]}

    def reset(self) -> tuple[list[float], dict[str, Any]]:
        return [0.0], {}

    def step(self, action: dict[str, Any]) -> tuple[list[float], float, bool, dict[str, Any]]:
        if action["y"] == "c":
            return [-1.0], -1.0, False, {}
        seconds = 10 * (1 + abs(action["x"].bit_length() - 3) + 0.5 * (action["y"] == "b"))
        self.tried = [*getattr(self, "tried", []), (seconds, action)]
        return [seconds], 1 / seconds, False, {}


@pytest.mark.parametrize("steps", [1, 100])
def test_it_finds_the_best_of_another_workload(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """1 is what CloudAI takes where no agent_steps is set."""
    env = Env(steps)
    with caplog.at_level(logging.INFO):
        assert TuneAgent(env, BaseAgentConfig()).run() == 0
    assert min(env.tried, key=lambda trial: trial[0])[1] == {"x": 4, "y": "a"}


@pytest.mark.parametrize("gpu", ["gb200", "gb300", "b200", "h100"])
def test_a_test_of_cloudai_s_own_workload_is_predicted(
    gpu: str, cloudai_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CloudAI's own file of Qwen3 30B with lists: what breaks a rule is left out, the rest has predictions."""
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    path = cloudai_source / f"conf/experimental/megatron_bridge/test/{gpu}/megatron_bridge_qwen_30b.toml"
    data = tomllib.loads(path.read_text())
    data["cmd_args"] |= {"tp": [1, 2, 4], "pp": [1, 2, 4], "mb": [1, 2]}
    definition = Registry().test_definitions_map["MegatronBridge"].model_validate(data | {"agent": "tune"})
    run = TestRun(name="qwen", test=definition, num_nodes=1, nodes=[])
    slurm = SimpleNamespace(scheduler="slurm", name="s", default_partition="main", gpus_per_node=8)
    env = SimpleNamespace(
        test_run=run, runner=SimpleNamespace(system=slurm), define_action_space=lambda: run.param_space
    )
    agent = TuneAgent(env, BaseAgentConfig())
    assert 0 < len(agent.actions) < 18
    assert all(data["cmd_args"]["num_gpus"] % (action["tp"] * action["pp"]) == 0 for action in agent.actions)
    assert agent.prior.is_predicted
    assert agent.select_action() is not None


def test_agent_steps_is_a_limit() -> None:
    env = Env(2)
    assert TuneAgent(env, BaseAgentConfig()).max_steps == 2
