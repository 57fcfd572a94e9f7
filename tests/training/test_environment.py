"""What a run says of its environment, of its nodes and of its memory, in its records."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cloudai_mbridge.training.process import device, provenance
from cloudai_mbridge.training.reporting import reports
from cloudai_mbridge.training.startup import environment
from tests.cases import every

Finished = Any
GIB = 1 << 30
SMI = "580.82, NVIDIA GB200, 189471, 2062, 3996, Enabled, 1200.00, 16\n"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def _output(answers: dict[str, str | None]) -> Callable[..., str | None]:
    """Answer commands by one of their words."""
    return lambda *command: next((text for word, text in answers.items() if word in command), None)


# Provenance


def test_the_packages_are_those_that_are_installed() -> None:
    versions = provenance.package_versions()
    assert versions["torch"] == metadata.version("torch")
    assert versions["cloudai-mbridge"] == metadata.version("cloudai-mbridge")
    assert "pytest" not in versions
    assert list(versions) == sorted(versions)
    assert provenance.package_version("no-such-package") is None


def _git(directory: Path, *words: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@x.example", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, "-C", str(directory), *words], check=True, capture_output=True)


@pytest.mark.process
def test_a_checkout_has_a_commit_and_says_if_it_was_changed(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) is None
    _git(tmp_path, "init")
    assert provenance.git_state(tmp_path) is None  # without a commit
    (tmp_path / "file").write_text("a")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-m", "x")
    (tmp_path / "untracked").write_text("results of a run")
    state = provenance.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("b")
    assert provenance.git_state(tmp_path) == {**state, "dirty": True}


@pytest.mark.process
def test_a_variable_of_gits_names_no_other_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    _git(tmp_path / "a", "init")
    _git(tmp_path / "a", "commit", "--allow-empty", "-m", "x")
    before = provenance.git_state(tmp_path / "a")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert before is not None
    assert provenance.git_state(tmp_path / "a") == before


@pytest.mark.process
@every("command", [("no-such-program",), ("false",), ("sleep", "60"), ("a\0b",)])
def test_a_command_that_does_not_answer_is_no_failure(command: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(provenance, "_TIMEOUT_S", 0.2)
    assert provenance.output_of(*command) is None


@pytest.mark.process
def test_what_reports_use_needs_no_torch() -> None:
    code = "import sys; from cloudai_mbridge.training.process.provenance import *; package_versions(); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Device


def test_the_kernels_word_on_the_driver_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "output_of", _output({"nvidia-smi": "570.1\n570.1"}))
    monkeypatch.setattr(environment, "_DRIVER_OF_THE_KERNEL", tmp_path / "version")
    assert environment._driver() == "570.1"
    (tmp_path / "version").write_text("580.82.07\n")
    assert environment._driver() == "580.82.07"


def test_no_driver_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "output_of", _output({}))
    monkeypatch.setattr(environment, "_DRIVER_OF_THE_KERNEL", tmp_path / "version")
    assert environment._driver() is None


@every(("version", "text"), [((2, 27, 5), "2.27.5"), (2708, "2708"), (None, None)])
def test_nccls_version(version: Any, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell() -> Any:
        if version is None:
            raise RuntimeError("not built with NCCL")
        return version

    monkeypatch.setattr(environment.torch.cuda.nccl, "version", tell)
    assert environment._nccl() == text


@pytest.mark.process
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made up: this machine has none."""
    monkeypatch.setattr(environment, "current_device", lambda: GPU)
    monkeypatch.setattr(environment, "describe_device", lambda: "NVIDIA H100")
    monkeypatch.setattr(environment, "_driver", lambda: "580.82")
    monkeypatch.setattr(environment, "_nccl", lambda: "2.27.5")
    monkeypatch.setattr(environment, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(environment, "package_version", {"transformer-engine-cu12": "2.7"}.get)
    said = environment.describe_environment()
    assert (said["device"], said["driver"], said["nccl"]) == ("NVIDIA H100", "580.82", "2.27.5")
    assert said["transformer_engine"] == "2.7"
    assert said["megatron_core"] == said["packages"]["megatron-core"] == metadata.version("megatron-core")


def test_a_cpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_device", lambda: CPU)
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device.platform, "processor", lambda: "")
    monkeypatch.setattr(device.torch, "get_num_threads", lambda: 8)
    assert device.describe_device() == "CPU (8 threads per rank)"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Intel(R)  Xeon(R) 8480C \nflags\t: x\n")
    assert device.describe_device() == "CPU Intel(R) Xeon(R) 8480C (8 threads per rank)"


# Nodes, read from a file system that is made up


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
    facts = environment.host_facts(root, lambda *command: SMI + SMI.replace("Enabled", "Disabled"))
    assert facts["hostname"]
    assert (facts["memory_gib"], facts["numa_nodes"], facts["governor"]) == (94, 2, "powersave")
    assert facts["links"] == {"mlx5_0/1": "400 Gb/sec (4X NDR), ACTIVE", "eth0": "25000 Mb/s"}
    assert (facts["gpus"], facts["gpu"], facts["driver"]) == (2, "NVIDIA GB200", "580.82")
    assert facts["ecc"] == ["Enabled", "Disabled"], "its GPUs differ"
    json.dumps(facts)


def test_a_node_that_tells_nothing(tmp_path: Path) -> None:
    facts = environment.host_facts(tmp_path, lambda *command: None)
    assert set(facts) == {"hostname", "kernel", "cpus"}
    assert environment.host_facts(tmp_path, lambda *command: "no devices were found\n") == facts


@pytest.mark.process
def test_this_machine() -> None:
    facts = environment.host_facts()
    assert facts["cpus"] > 0
    assert facts["memory_gib"] > 0


def test_what_most_nodes_have_is_said_once() -> None:
    hosts: list[dict[str, Any]] = [{"hostname": f"n{i}", "kernel": "6.8", "governor": "performance"} for i in range(4)]
    hosts[2]["kernel"] = "5.15"
    del hosts[3]["governor"]
    assert environment.in_short(hosts) == {
        "names": ["n0", "n1", "n2", "n3"],
        "facts": {"kernel": "6.8", "governor": "performance"},
        "odd": {"n2": {"kernel": "5.15"}, "n3": {"governor": None}},
    }
    assert environment.in_short([]) == {"names": [], "facts": {}, "odd": {}}


# Memory


def test_the_resident_set_is_this_processs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t 3145728 kB\nVmRSS:\t 12 kB\n")
    monkeypatch.setattr(reports, "_STATUS", tmp_path / "status")
    assert reports.peak_memory_gib(CPU) == 3.0
    assert reports.memory_kind(CPU) == "resident set"


@pytest.mark.parametrize(("platform", "maxrss"), [("linux", 2 << 20), ("darwin", 2 << 30)])
def test_without_proc_the_system_call_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, maxrss: int
) -> None:
    monkeypatch.setattr(reports, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(reports.sys, "platform", platform)
    monkeypatch.setattr(reports.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=maxrss))
    assert reports.peak_memory_gib(CPU) == 2.0


def test_the_peak_stays() -> None:
    before = reports.peak_memory_gib(CPU)
    held = bytearray(os.urandom(1) * (256 << 20))
    grown = reports.peak_memory_gib(CPU)
    del held
    assert grown >= before
    assert reports.peak_memory_gib(CPU) >= grown - 0.01


def test_a_gpus_memory_is_what_its_allocator_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(reports.torch.cuda, "max_memory_reserved", lambda device: asked.append(device) or 5 * GIB)
    assert reports.peak_memory_gib(GPU) == 5.0
    assert asked == [GPU]
    assert reports.memory_kind(GPU) == "accelerator, reserved"


# A run


def test_the_records_of_a_run(train: Callable[..., Finished]) -> None:
    done = train(2, {}, "train.train_iters=3", "scheduler.lr_decay_iters=3")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MBRIDGE_RUN ")]
    said = json.loads(line.partition(" ")[2])
    assert said["memory_kind"] == "resident set"
    told = said["environment"]
    assert (told["device"], told["torch"], told["driver"]) == (said["device"], said["torch"], None)
    assert told["packages"]["torch"] == said["torch"]
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    peaks = [record["peak_memory_gib"] for record in done.records]
    assert len(peaks) == 3
    assert all(0.1 < peak < 8 for peak in peaks)
    assert peaks == sorted(peaks)


def test_every_number_is_the_largest_ranks(ranks: Callable[..., Finished]) -> None:
    """Memory and time are found by one collective, and may be on different ranks."""
    done = ranks(
        2,
        """
        import torch.distributed as dist
        from cloudai_mbridge.training.process.device import largest
        from cloudai_mbridge.training.process.log_lines import write_line
        dist.init_process_group("gloo")
        calls, reduce = [], dist.all_reduce
        dist.all_reduce = lambda *args, **keys: calls.append(1) or reduce(*args, **keys)
        rank = dist.get_rank()
        write_line(f"found {largest(1.0 + rank, 5.0 - rank)} by {len(calls)}")
        dist.destroy_process_group()
        """,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("found")] == ["found [2.0, 5.0] by 1"] * 2
