"""Environment of this rank, and facts of every node, for a run's opening record.

Of a rank: the device, its driver and libraries, the packages. Of a node: facts that may make it slower than the others,
gathered once before the first step; those that it does not report are left out.
"""

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.process.device import current_device, describe_device
from cloudai_mbridge.training.process.provenance import git_state, output_of, package_version, package_versions

_DRIVER_OF_THE_KERNEL = Path("/sys/module/nvidia/version")
_ENGINES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
_ROOT = Path("/")
_GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
_GPU_FIELDS = {
    "driver": "driver_version",
    "gpu": "name",
    "gpu_memory_mib": "memory.total",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "ecc": "ecc.mode.current",
    "power_limit_w": "power.limit",
    "pcie_link": "pcie.link.width.max",
}


def describe_environment() -> dict[str, Any]:
    """Return the environment of this rank, None for unknown or missing parts. The process group must be up."""
    on_gpu = current_device().type != "cpu"
    engines = (package_version(name) for name in _ENGINES) if has_transformer_engine() else ()
    # `megatron.core.__version__` adds the commit of whatever repository lies around it, ours if it is in .venv
    known = {"torch": str(torch.__version__), "megatron-core": installed_version()}
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": known["torch"],
        "megatron_core": known["megatron-core"],
        "transformer_engine": next((found for found in engines if found), None),
        "cuda": torch.version.cuda,
        "nccl": _nccl() if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "device": describe_device(),
        "git": git_state(),
        "packages": dict(sorted({**package_versions(), **known}.items())),
    }


def _nccl() -> str | None:
    try:
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a torch without NCCL
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _driver() -> str | None:
    """Read the version from the kernel, without delay, else from nvidia-smi, in a second or two on a big node."""
    try:
        return _DRIVER_OF_THE_KERNEL.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return lines.splitlines()[0] if lines else None


def host_facts(root: Path = _ROOT, query: Callable[..., str | None] = output_of) -> dict[str, Any]:
    """Return the facts of this node. root: of its file system; query: runs a command, as `output_of` does."""
    memory = re.search(r"^MemTotal:\s*(\d+)\b", _read(root / "proc/meminfo"), flags=re.MULTILINE)
    facts = {
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": memory and round(int(memory[1]) / 2**20),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "governor": _read(root / _GOVERNOR).strip() or None,
        "links": _links(root) or None,
        **_gpus(query),
    }
    return {name: value for name, value in facts.items() if value is not None}


def gather_host_facts() -> dict[str, Any]:
    """Return the facts of all nodes, on every rank, in the form of `in_short`. The process group must be up."""
    own = host_facts() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None  # one rank of a node reports them
    found: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return in_short([facts for facts in found if facts])


def in_short(hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the names of nodes, the facts that most of them have, and the differences of each other node.

    {"names": [...], "facts": {...}, "odd": {name: {fact: value, or null if not reported}}}
    """
    names = [str(host["hostname"]) for host in hosts]
    own = [{name: fact for name, fact in host.items() if name != "hostname"} for host in hosts]
    facts = {}
    for name in dict.fromkeys(name for host in own for name in host):
        values = [host.get(name) for host in own]
        facts[name] = max(values, key=values.count)
    odd = {
        host: different
        for host, told in zip(names, own, strict=True)
        if (different := {name: told.get(name) for name, fact in facts.items() if told.get(name) != fact})
    }
    return {"names": names, "facts": facts, "odd": odd}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _links(root: Path) -> dict[str, str]:
    """Return the InfiniBand ports with their rates, and the network interfaces that are up with their Mb/s."""
    found = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if rate := _read(port / "rate").strip():
            state = _read(port / "state").rpartition(":")[2].strip()
            found[f"{port.parent.parent.name}/{port.name}"] = f"{rate}, {state}" if state else rate
    for device in sorted((root / "sys/class/net").glob("*")):
        speed = _read(device / "speed").strip()
        if _read(device / "operstate").strip() == "up" and speed.isdigit():
            found[device.name] = f"{speed} Mb/s"
    return found


def _gpus(query: Callable[..., str | None]) -> dict[str, Any]:
    """Return nvidia-smi's values of all GPUs: one value if they agree, else all of them in order."""
    said = query("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS.values())}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    rows = [row for row in rows if len(row) == len(_GPU_FIELDS)]
    if not rows:
        return {}
    columns = {name: list(column) for name, column in zip(_GPU_FIELDS, zip(*rows, strict=True), strict=True)}
    told = {name: column[0] if len(set(column)) == 1 else column for name, column in columns.items()}
    return {"gpus": len(rows), **{name: value for name, value in told.items() if value not in ("[N/A]", "")}}
