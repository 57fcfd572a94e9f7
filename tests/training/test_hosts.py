"""The facts of nodes: read from a file system that is made up, and put in short."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.startup.environment import host_facts, in_short

SMI = "580.82, NVIDIA GB200, 189471, 2062, 3996, Enabled, 1200.00, 16\n"


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_node_with_gpus_and_links(tmp_path: Path) -> None:
    root = make(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       98765432 kB\nMemFree: 1 kB\n",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/net/eth0/speed": "25000\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth1/speed": "-1\n",
            "sys/class/net/eth1/operstate": "down\n",
        },
    )
    facts = host_facts(root, lambda *command: SMI + SMI.replace("Enabled", "Disabled"))
    assert facts["hostname"]
    assert (facts["memory_gib"], facts["numa_nodes"], facts["governor"]) == (94, 2, "powersave")
    assert facts["links"] == {"mlx5_0/1": "400 Gb/sec (4X NDR), ACTIVE", "eth0": "25000 Mb/s"}
    assert (facts["gpus"], facts["gpu"], facts["driver"]) == (2, "NVIDIA GB200", "580.82")
    assert facts["ecc"] == ["Enabled", "Disabled"], "its GPUs differ"
    json.dumps(facts)


def test_a_node_that_tells_nothing(tmp_path: Path) -> None:
    facts = host_facts(tmp_path, lambda *command: None)
    assert set(facts) == {"hostname", "kernel", "cpus"}
    assert host_facts(tmp_path, lambda *command: "no devices were found\n") == facts


@pytest.mark.process
def test_this_machine() -> None:
    facts = host_facts()
    assert facts["cpus"] > 0
    assert facts["memory_gib"] > 0


def test_what_most_nodes_have_is_said_once() -> None:
    hosts: list[dict[str, Any]] = [{"hostname": f"n{i}", "kernel": "6.8", "governor": "performance"} for i in range(4)]
    hosts[2]["kernel"] = "5.15"
    del hosts[3]["governor"]
    assert in_short(hosts) == {
        "names": ["n0", "n1", "n2", "n3"],
        "facts": {"kernel": "6.8", "governor": "performance"},
        "odd": {"n2": {"kernel": "5.15"}, "n3": {"governor": None}},
    }
    assert in_short([]) == {"names": [], "facts": {}, "odd": {}}
