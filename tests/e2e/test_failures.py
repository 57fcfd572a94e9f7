"""Runs that die are failures with a reason and evidence, whatever kills them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

TEST = """
name = "long"
[[Tests]]
id = "long"
name = "long"
description = "steps of about a tenth of a second"
test_template_name = "MegatronBridge"
{run}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_small"
compute_dtype = "fp32"
num_gpus = 2
max_steps = {steps}
{args}
"""


def argv(directory: Path, system: str = 'name = "local"\nscheduler = "local"\n', **values: Any) -> list[str]:
    (directory / "system.toml").write_text(system)
    (directory / "s.toml").write_text(TEST.format(**{"run": "", "args": "", "steps": 10, **values}))
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/s.toml"]
    return [sys.executable, "-m", "cloudai_mbridge", "run", *files, f"--output-dir={directory}/out"]


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str], **env: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()


def wait_for_step(directory: Path, step: int) -> None:
    """Wait until the log says that a step is done."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        logs = list(directory.glob("out/*/*/*/0/stdout.txt"))
        if logs and f'"step": {step},' in logs[0].read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def processes_of(directory: Path, text: str) -> list[int]:
    """Return the processes that run in a directory below `directory` and have `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(directory) in os.readlink(entry / "cwd"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if text in command:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def kill_youngest(directory: Path, text: str) -> None:
    """Kill a rank: srun's and torchrun's command lines have the module's name too, and process numbers wrap around."""
    processes = map(psutil.Process, processes_of(directory, text))
    max(processes, key=psutil.Process.create_time).kill()


def report(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("out/*/report.json")
    (point,) = json.loads(path.read_text())["points"]
    return point


@pytest.mark.parametrize(
    "victim",
    [
        "cloudai_mbridge.training --config",
        pytest.param("training.one_machine", marks=pytest.mark.long),
        pytest.param("run.sh", marks=pytest.mark.long),
    ],
)
def test_killed_after_step_3(tmp_path: Path, start: Any, victim: str) -> None:
    process = start(argv(tmp_path, steps=1000))
    wait_for_step(tmp_path, 3)
    kill_youngest(tmp_path, victim)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 1, err
    point = report(tmp_path)
    assert point["verdict"] == "failed"
    assert 3 <= len(point["steps"]) < 1000
    assert any("of 1000 steps are in the log" in reason for reason in point["reasons"])
    assert any("the job ended as FAILED" in reason for reason in point["reasons"])
    assert any(" iteration " in line for line in point["last_lines"])
    assert not any("MBRIDGE_STEP" in line for line in (*point["evidence"], *point["last_lines"]))
    assert "of 1000 steps are in the log" in " ".join(out.split())
    assert "Traceback" not in err
    assert not processes_of(tmp_path, "cloudai_mbridge.training"), "ranks were left running"


@pytest.mark.slurm
def test_killed_after_step_3_on_slurm(tmp_path: Path, start: Any, cluster: Any) -> None:
    system = 'name = "c"\nscheduler = "slurm"\ndefault_partition = "main"\nmonitor_interval = 0.5\n'
    process = start(argv(tmp_path, system + '[[partitions]]\nname = "main"\n', steps=1000), **cluster.env)
    wait_for_step(tmp_path, 3)
    kill_youngest(tmp_path, "cloudai_mbridge.training --config")
    _, err = process.communicate(timeout=1500)
    assert process.returncode == 1, err
    point = report(tmp_path)
    assert point["verdict"] == "failed"
    assert 3 <= len(point["steps"]) < 1000
    assert any("FAILED" in reason for reason in point["reasons"])
    assert any(" iteration " in line for line in point["last_lines"])
    assert not any("MBRIDGE_STEP" in line for line in (*point["evidence"], *point["last_lines"]))


@pytest.mark.long
def test_a_loss_that_is_not_finite_fails_the_run(tmp_path: Path, start: Any) -> None:
    process = start(argv(tmp_path, args="lr = 1e30\nwarmup_iters = 0"))
    process.communicate(timeout=1500)
    assert process.returncode == 1
    point = report(tmp_path)
    assert point["verdict"] == "failed"
    assert any("Error" in line or "nan" in line.lower() for line in point["evidence"])


def test_what_megatron_refuses_is_a_failure_with_its_words(tmp_path: Path, start: Any) -> None:
    process = start(argv(tmp_path, args='[Tests.extra_cmd_args]\n"model.init_method_std" = "-1.0"'))
    out, _ = process.communicate(timeout=1500)
    assert process.returncode == 1
    point = report(tmp_path)
    assert point["verdict"] == "failed"
    assert any("Error" in line for line in point["evidence"])
    assert "0 of 10 steps are in the log" in " ".join(out.split())


@pytest.mark.long
def test_time_limit(tmp_path: Path, start: Any) -> None:
    process = start(argv(tmp_path, run='time_limit = "20s"', steps=100000))
    process.communicate(timeout=1500)
    assert process.returncode == 1
    point = report(tmp_path)
    assert point["job"]["state"] == "TIMEOUT"
    assert not processes_of(tmp_path, "cloudai_mbridge.training")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_what_runs_and_still_reports(tmp_path: Path, start: Any, number: int, code: int) -> None:
    process = start(argv(tmp_path, steps=100000))
    wait_for_step(tmp_path, 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == code
    assert "Traceback" not in err
    point = report(tmp_path)
    assert point["verdict"] == "cancelled"
    assert point["job"]["state"] == "INTERRUPTED"
    assert not processes_of(tmp_path, "cloudai_mbridge.training")


@pytest.mark.long
@pytest.mark.slurm
def test_a_signal_cancels_slurm_jobs(tmp_path: Path, start: Any, cluster: Any) -> None:
    system = 'name = "c"\nscheduler = "slurm"\ndefault_partition = "main"\nmonitor_interval = 0.5\n'
    process = start(argv(tmp_path, system + '[[partitions]]\nname = "main"\n', steps=100000), **cluster.env)
    wait_for_step(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert report(tmp_path)["job"]["state"] == "INTERRUPTED"
    assert not cluster.run("squeue", "--noheader", "--states=running,pending,completing").stdout
