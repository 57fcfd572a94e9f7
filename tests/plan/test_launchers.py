"""Launchers and systems as objects: the launcher of each point, and no question for a kind elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.launchers import EMBEDDED, LAUNCHERS, MEGATRON_BRIDGE, launcher_of, launchers_of

PACKAGE = Path(cloudai_mbridge.__file__).parent
# Where a kind decides which function or class is taken, once; rules decide about points before they have a launcher
DECIDES = {"plan/launchers.py", "plan/run_plan.py", "models/system.py", "launch/write.py", "pipeline.py"}
DECIDES |= {"integrations/nemo_run.py"}
KIND = re.compile(r"upstream is (?:not )?None|isinstance\([\w.]*system\w*, \(?(?:Local|Slurm)System")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("embedded", [EMBEDDED]),
        ("megatron_bridge", [MEGATRON_BRIDGE]),
        (["embedded", "megatron_bridge"], [MEGATRON_BRIDGE, EMBEDDED]),  # the one that needs more of a test
    ],
)
def test_the_launchers_of_a_test(given: Any, expected: list[Any]) -> None:
    data = {"name": "t", "description": "d", "test_template_name": "MegatronBridge", "cmd_args": {"launcher": given}}
    assert launchers_of(TestDefinition.model_validate(data)) == expected


def test_the_launcher_of_a_planned_run() -> None:
    assert launcher_of(None) is EMBEDDED
    assert launcher_of({"megatron_bridge": {}}) is MEGATRON_BRIDGE
    assert [LAUNCHERS[launcher.name] for launcher in (EMBEDDED, MEGATRON_BRIDGE)] == [EMBEDDED, MEGATRON_BRIDGE]


def test_a_launcher_without_steps_in_its_log_hangs_only_where_the_scenario_says_so() -> None:
    default, given = RunnerConfig(), RunnerConfig(hang_timeout_s=60)
    assert MEGATRON_BRIDGE.hang_timeout_s(default) is None
    assert EMBEDDED.hang_timeout_s(default) == default.hang_timeout_s
    assert (MEGATRON_BRIDGE.hang_timeout_s(given), EMBEDDED.hang_timeout_s(given)) == (60, 60)


def test_no_other_module_asks_for_the_kind() -> None:
    """Each further question is a further place to forget a launcher or a system."""
    apart = ("constraints", "sweep", "training")
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    asking = {str(path) for path in modules if path.parts[0] not in apart and KIND.search((PACKAGE / path).read_text())}
    assert asking <= DECIDES
