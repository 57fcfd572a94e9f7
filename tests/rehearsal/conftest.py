"""Scenarios whose job has a stand-in for its interpreter: only the program of the rehearsal is a fake."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import mbridge_here as mbridge_here

FAKE = Path(__file__).with_name("fake_program.py")
START = {"event": "start", "megatron_core": "0.16.1", "python": "/p/python", "import_s": 1.5}
CONFIGURED = {
    "event": "configured",
    "ranks": [0, 1],
    "layout": {"tp": 2, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 2},
    "adapted": {"model.apply_rope_fusion": False},
    "transformer_engine": False,
}
REFUSED = {
    "event": "refused",
    "rank": 1,
    "stage": "model",
    "kind": "ValueError",
    "message": "num_layers (9) must be divisible",
    "where": ["megatron/core/a.py:1 f", "megatron/core/b.py:2 g"],
    "keys": ["model.num_layers"],
}
UNUSABLE = {"event": "unusable", "message": "Megatron-Core is missing; install the train extra"}


def built(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "built",
        "rank": rank,
        "parameters": {"count": 1000 + rank, "experts": 0, "trained": 1000, "bytes": 4000},
        "gradients": {"count": 1000, "bytes": 4000, "buckets": 1},
        "optimizer": {"count": 1000, "main_bytes": 4000, "moment_bytes": 8000},
        "checkpoint": {"keys": 3, "bytes": 4000},
        "shards": [["a", [4], [0], [4], 16, True]],
        **more,
    }


GOOD = [START, CONFIGURED, built(0), built(1)]


def write_scenario(
    directory: Path,
    told: Mapping[str, Mapping[str, Any]],
    *,
    scheduler: str = 'scheduler = "local"',
    system: str = 'gpu_type = "h100"',
    test: str = "",
    runner: str = "",
) -> tuple[str, ...]:
    """Write a system and a scenario with a test for each thing told; return the options that name them."""
    python = directory / "python"
    python.write_text(f"#!{sys.executable}\n{FAKE.read_text().replace('@PYTHON@', sys.executable)}")
    python.chmod(0o755)
    text = f'name = "s"\n{scheduler}\npython_executable = "{python}"\n{system}\n'
    (directory / "system.toml").write_text(text)
    parts = [f'name = "scenario"\n{runner}']
    for name, each in told.items():
        parts.append(
            f'[[Tests]]\nid = "{name}"\nname = "{name}"\ndescription = "d"\ntest_template_name = "MegatronBridge"\n'
            f'num_nodes = 1\ntime_limit = "00:10:00"\n[Tests.cmd_args]\nlauncher = "embedded"\n'
            'model_recipe_name = "gpt_tiny"\ncompute_dtype = "fp32"\nnum_gpus = 2\nmax_steps = 5\ntp = 2\n'
            f"{test}\n[Tests.extra_env_vars]\nFAKE_REHEARSAL = {json.dumps(json.dumps(each))}\n"
        )
    (directory / "scenario.toml").write_text("\n".join(parts))
    return (f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml")


Write = Callable[..., tuple[str, ...]]


@pytest.fixture
def scenario(tmp_path: Path) -> Write:
    return lambda told, **more: write_scenario(tmp_path, told, **more)
