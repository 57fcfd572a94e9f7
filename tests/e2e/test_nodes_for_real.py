"""A node that is slow for real: its jobs have a share of a core, by the kernel. Found in a sweep."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.drill, pytest.mark.timeout(3600)]
CPU = Path("/sys/fs/cgroup/cpu")
SLOW = "gb200-3"
TEST = """
[[Tests]]
id = "{id}"
name = "{id}"
description = "a check of nodes"
test_template_name = "MegatronBridge"
{run}
  [Tests.cmd_args]
  launcher = "embedded"
  model_family_name = "tiny"
  model_recipe_name = "gpt_tiny"
  compute_dtype = "fp32"
  num_gpus = 1
  gpus_per_node = 1
  max_steps = 30
  gb = 8
  [Tests.metrics]
  warmup_steps = 5
"""
SYSTEM = """
name = "c"
scheduler = "slurm"
default_partition = "main"
gpus_per_node = 1
monitor_interval = 0.5
[[partitions]]
name = "main"
"""


@pytest.fixture(scope="module")
def slowed(new_cluster: Any) -> Iterator[Any]:
    """Four nodes, of which one has a third of a core."""
    if not (CPU / "cpu.shares").exists() or os.getuid():
        pytest.skip("needs root and cgroup v1")
    sandbox = new_cluster(nodes=4)
    (daemon,) = [
        process.pid
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "slurmd"
        and SLOW in process.info["cmdline"]
        and sandbox.env["SLURM_CONF"] in process.info["cmdline"]
    ]
    group = CPU / f"mbridge-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("50000")
        (group / "cpu.cfs_quota_us").write_text("17000")
        (group / "cgroup.procs").write_text(str(daemon))
        yield sandbox
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(pid)
        group.rmdir()


def nodes_of(run: Any) -> dict[str, Any]:
    shown = json.loads(run.command("nodes show", "--json").finish(0).stdout)
    print(json.dumps(shown, indent=1))
    return {node["node"]: node for node in shown["nodes"]}


def test_a_sweep(slowed: Any, start_run: Any) -> None:
    test = TEST.format(id="sweep", run="iterations = 6").replace("gb = 8", "gb = 8\n  mb = [1, 2, 4]")
    run = start_run(slowed, [test], runner="max_parallel = 1", whole_system=SYSTEM).finish(0, timeout_s=1500)
    found = nodes_of(run)
    slow = {name for name, node in found.items() if node["verdict"] == "slow"}
    assert slow == ({SLOW} if SLOW in found else set())
