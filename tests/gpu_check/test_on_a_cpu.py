"""The whole check on a machine without a GPU: its parts for GPUs are skipped by name, the others pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.gpu_check import tiny
from cloudai_mbridge.gpu_check.kit import Device, Kit
from cloudai_mbridge.gpu_check.run import PARTS
from tests.golden import Sentence
from tests.training.conftest import run_ranks

pytest.importorskip("torch")

ON_A_CPU = {"cpu_reference", "distributed_optimizer", "checkpoint", "profile", "line", "loop_overhead"}


def check(*arguments: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cloudai_mbridge.gpu_check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(7200)  # against a hang; each command in it has a limit of its own
def test_the_whole_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "gpu_check.json"
    done = check("--out", out, "--work-dir", tmp_path / "work", "--patience", "10")
    data: dict[str, Any] = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    ends = {name: (part["status"], part["reason"]) for name, part in data["parts"].items()}
    assert {name for name, (status, _) in ends.items() if status == "passed"} == ON_A_CPU
    (reason,) = {reason for status, reason in ends.values() if status == "skipped"}
    assert reason in ("torch is a CPU build", "CUDA_VISIBLE_DEVICES hides all GPUs")
    assert len(ends) == len(PARTS)
    assert data["device"]["packages"]["torch"]
    figures = {name: part["figures"] for name, part in data["parts"].items()}
    assert figures["checkpoint"]["losses"] == figures["checkpoint"]["losses_after_resuming"]
    assert figures["loop_overhead"]["period_over_megatron"]["median"] > 0.0
    assert figures["profile"]["trace_events"] > 0
    gate = figures["line"]["gate"]  # which of them is a matter of this machine's noise
    assert gate in {"pass", "regression", "inconclusive", "improvement"} or gate.startswith("not judged: ")


def test_a_part_of_no_such_name(tmp_path: Path, sentence: Sentence) -> None:
    done = check("--out", tmp_path / "x.json", "--only", "warp")
    assert done.returncode == 2
    sentence(done.stderr)
    assert not (tmp_path / "x.json").exists()


def test_a_file_that_cannot_be_written(tmp_path: Path, sentence: Sentence) -> None:
    done = check("--out", tmp_path / "no" / "x.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    sentence(done.stderr)


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, sentence: Sentence
) -> None:
    from cloudai_mbridge.gpu_check import __main__ as program

    monkeypatch.setattr(program, "find_spec", lambda name: None if name in ("megatron", "tomlkit") else object())
    assert program.main(["--out", str(tmp_path / "x.json")]) == 2
    sentence(capsys.readouterr().err)


def test_a_machine_that_cannot_be_probed_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: Sentence
) -> None:
    """As where the driver is wedged."""
    from cloudai_mbridge.gpu_check.run import run

    assert run(tmp_path / "x.json", tmp_path, None, 1.0, started=-1e9) == 2
    sentence(capsys.readouterr().err)


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloudai_mbridge.gpu_check import machine

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.why_no_gpu(None) == "torch is a CPU build"
    assert machine.why_no_gpu("12.8") == "no GPU that torch can use"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.is_hidden()
    assert machine.why_no_gpu("12.8") == "CUDA_VISIBLE_DEVICES hides all GPUs"


def test_the_reference_trains_where_transformer_engine_does_not_import(tmp_path: Path, monkeypatch: Any) -> None:
    """As on a machine with a GPU once its GPUs are hidden."""
    stub = tmp_path / "site/transformer_engine/__init__.py"
    stub.parent.mkdir(parents=True)
    stub.write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(stub.parents[1]), prepend=os.pathsep)
    monkeypatch.setattr(tiny, "RECIPES", ("gpt_tiny",))
    monkeypatch.setattr(tiny, "STEPS", 4)
    (tmp_path / "work").mkdir()
    figures = tiny.cpu_reference(Kit(tmp_path / "work", Device()))
    assert figures["gpt_tiny"]["last_loss"] < figures["gpt_tiny"]["first_loss"]
    assert figures["gpt_tiny"]["transformer_engine"] is False


_SYNCHRONIZATIONS = """
from cloudai_mbridge.gpu_check.overhead import CPU_MODEL, Bench

small = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "vocab_size": 512, "seq_length": 8}
bench = Bench({**CPU_MODEL, **small}, steps=3)
for block in (bench.bare_block, bench.loop_block, bench.timed_block):
    count = []
    bench._synchronize = lambda: count.append(None)
    block()
    print(block.__name__, len(count), len(bench.inside))
"""


def test_only_timed_blocks_wait_for_each_part_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SYNCHRONIZATIONS)
    done = run_ranks(1, ["script.py"], tmp_path)
    found = [line.split() for line in done.stdout.splitlines() if "_block" in line]
    assert found == [["bare_block", "4", "0"], ["loop_block", "0", "0"], ["timed_block", "12", "2"]]
