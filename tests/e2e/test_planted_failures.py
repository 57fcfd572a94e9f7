"""Failures planted on purpose are found, named, and shown with their evidence.

The hang and the NaN are planted in real training; what needs GPUs is said by the stand-in, on a real Slurm.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOCAL = 'name = "local"\nscheduler = "local"\n'
# Imported by every Python of the job; rank 1 goes to sleep in its third step
SITE_CUSTOMIZE = """
import os

if os.environ.get("RANK") == "1":
    import time

    from cloudai_mbridge.training.process import hang

    steps = []
    step_done = hang.step_done

    def planted_sleep():
        step_done()
        steps.append(1)
        if len(steps) == 2:
            time.sleep(1000)

    hang.step_done = planted_sleep
"""
# Rank 1 starts slowly, as out of a container on a busy file system, and then hangs
SLOW_START = """
import os, sys

if os.environ.get("RANK") == "1":
    import threading, time

    class Finder:
        def find_spec(self, name, path, target=None):
            if name == "torch":
                planted_sleep()

    def planted_sleep():
        time.sleep(1000)

    time.sleep(5)
    sys.meta_path.insert(0, Finder())
"""
REAL = """
[[Tests]]
id = "{id}"
name = "{id}"
description = "real training"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = {num_gpus}
max_steps = 8
{args}
[Tests.extra_env_vars]
{env}
"""
ONE_THREAD = (
    'OMP_NUM_THREADS = "1"'  # threads of one rank that wait for each other compute for nothing on a busy machine
)
CUDA_OOM = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"
    " 79.11 GiB of which 1.02 GiB is free.\n"
)
NCCL_TIMEOUT = (
    "[rank0]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran"
    " for 600061 milliseconds before timing out."
)
NOISE = (
    "[rank2]:[E ProcessGroupNCCL.cpp:1182] [Rank 2] NCCL watchdog thread terminated with exception: NCCL error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
)


def processes_below(directory: Path) -> list[str]:
    """Return the command lines of the processes that work below a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(f"{directory}/"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def check_evidence(run: Any, test_id: str, text: str) -> None:
    """Check that a line is shown wherever one looks."""
    point = run.point(test_id)
    (line,) = [line for line in point["failure"]["evidence"] if text in line][:1]
    assert line in point["evidence"]
    assert line in (run.root / point["key"] / "report.txt").read_text()
    assert " ".join(line.split())[:80] in run.words
    assert point["failure"]["title"] in run.words
    assert point["failure"]["title"] in run.report_text


# ---- in real training


@pytest.mark.long  # three minutes of silence
def test_a_rank_that_sleeps(start_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    asleep = REAL.format(id="asleep", num_gpus=2, args="", env=f'PYTHONPATH = "{tmp_path}"')
    # far longer than the imports of a busy machine take
    run = start_run(None, [asleep], whole_system=LOCAL, runner="hang_timeout_s = 180").finish(1)
    point = run.point("asleep")
    assert (point["verdict"], point["job"]["state"], point["failure"]["id"]) == ("failed", "HUNG", "hang")
    assert any("after step 2" in reason for reason in point["reasons"])
    assert [step["step"] for step in point["steps"]] == [1, 2]
    assert len(point["attempts"]) == 1, "it would hang again"
    check_evidence(run, "asleep", "planted_sleep")
    stacks = run.root / point["key"] / "stacks"
    assert "planted_sleep" in (stacks / "rank-1.txt").read_text()
    assert "planted_sleep" not in (stacks / "rank-0.txt").read_text(), "rank 0 waits for it elsewhere"
    assert not processes_below(run.directory)


def test_a_hang_in_a_slow_start_leaves_its_stack(start_run: Any, tmp_path: Path) -> None:
    """The rank began when a tenth of the time was over: its timer has to end before the runner's."""
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    asleep = REAL.format(id="asleep", num_gpus=2, args="", env=f'PYTHONPATH = "{tmp_path}"')
    run = start_run(None, [asleep], whole_system=LOCAL, runner="hang_timeout_s = 40").finish(1)
    point = run.point("asleep")
    assert (point["job"]["state"], point["failure"]["id"]) == ("HUNG", "hang")
    assert "planted_sleep" in (run.root / point["key"] / "stacks" / "rank-1.txt").read_text()
    check_evidence(run, "asleep", "planted_sleep")


def test_a_loss_that_is_not_a_number(start_run: Any) -> None:
    pytest.importorskip("torch")
    nan = REAL.format(id="nan", num_gpus=1, args="lr = 1e30\nwarmup_iters = 0", env=ONE_THREAD)
    run = start_run(None, [nan], whole_system=LOCAL).finish(1)
    point = run.point("nan")
    assert (point["verdict"], point["failure"]["id"]) == ("failed", "nan_loss")
    assert len(point["attempts"]) == 1
    assert point["failure"]["evidence"]
    check_evidence(run, "nan", point["failure"]["evidence"][0])
    assert not processes_below(run.directory)


# ---- said by the stand-in


@pytest.fixture(scope="module")
def small(new_cluster: Callable[..., Any]) -> Any:
    return new_cluster(nodes=2, mem_mb=1600)


@pytest.fixture(scope="module")
def planted(small: Any, start_shared_run: Any, stand_in_test: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All of them in one run. A job has 200 MB of memory for its CPU."""
    marker = tmp_path_factory.mktemp("marker") / "was-here"
    tests = [
        stand_in_test("gpu_memory", {"at": 2, "say": CUDA_OOM + NOISE, "exit": 1}),
        stand_in_test("host_memory", {"at": 2, "use_mb": 500, "hang": 60}),
        stand_in_test("collective", {"at": 2, "say": NCCL_TIMEOUT, "exit": 1}),
        stand_in_test("collective_once", {"at": 2, "say": NCCL_TIMEOUT, "exit": 1, "only_first": str(marker)}),
        stand_in_test("fine"),
    ]
    return start_shared_run(small, tests, runner="retries = 2").finish(1)


@pytest.mark.slurm
def test_a_gpu_without_memory(planted: Any) -> None:
    point = planted.point("gpu_memory")
    assert (point["verdict"], point["failure"]["id"]) == ("failed", "out_of_memory"), "the cause, not what follows it"
    assert len(point["attempts"]) == 1
    check_evidence(planted, "gpu_memory", "CUDA out of memory")


@pytest.mark.slurm
def test_a_node_without_memory(planted: Any) -> None:
    point = planted.point("host_memory")
    assert (point["verdict"], point["failure"]["id"]) == ("failed", "host_out_of_memory"), point["evidence"]
    assert len(point["attempts"]) == 1
    check_evidence(planted, "host_memory", "memory limit")


@pytest.mark.slurm
def test_a_collective_that_times_out_is_retried_within_the_budget(planted: Any) -> None:
    point = planted.point("collective")
    assert (point["verdict"], point["failure"]["id"]) == ("failed", "nccl_timeout")
    assert [attempt["number"] for attempt in point["attempts"]] == [1, 2, 3]
    assert len({attempt["job_id"] for attempt in point["attempts"]}) == 3, "every attempt is a job of its own"
    assert [attempt["failure"] for attempt in point["attempts"]][:2] == ["nccl_timeout"] * 2
    for kept in ("attempt-1", "attempt-2"):
        assert "Watchdog caught" in (planted.root / point["key"] / kept / "stderr.txt").read_text()
    check_evidence(planted, "collective", "Watchdog caught collective operation timeout")
    assert "attempt 2 failed: nccl_timeout; trying again (2 of 2 retries)" in planted.words


@pytest.mark.slurm
def test_a_retry_that_succeeds_is_a_success(planted: Any) -> None:
    point = planted.point("collective_once")
    assert (point["verdict"], point["reasons"], point["failure"]) == ("success", [], None)
    first, second = point["attempts"]
    assert (first["state"], first["failure"], second["state"]) == ("FAILED", "nccl_timeout", "COMPLETED")
    assert first["job_id"] != second["job_id"]
    assert [step["step"] for step in point["steps"]] == [1, 2, 3, 4, 5]
    assert "Watchdog caught" in (planted.root / point["key"] / "attempt-1" / "stderr.txt").read_text()
    assert "Attempts:" in (planted.root / point["key"] / "report.txt").read_text()
    assert planted.point("fine")["verdict"] == "success"
    assert "[5/5]" in planted.stdout
    assert "[6/5]" not in planted.stdout, "a retry counts no run twice"


@pytest.mark.long
@pytest.mark.slurm
def test_a_slurm_job_that_hangs_is_cancelled(small: Any, start_run: Any, stand_in_test: Any, nothing_left: Any) -> None:
    tests = [stand_in_test("stuck", {"at": 2, "hang": 1000}), stand_in_test("slow", {"step_s": 1.5})]
    run = start_run(small, tests, runner="hang_timeout_s = 45").finish(1)
    point = run.point("stuck")
    assert (point["verdict"], point["job"]["state"], point["failure"]["id"]) == ("failed", "HUNG", "hang")
    assert any("s after step 2" in reason for reason in point["reasons"])
    assert len(point["attempts"]) == 1
    assert run.point("slow")["verdict"] == "success", "slow is not stuck"
    shown = small.run("scontrol", "show", "job", point["job"]["job_id"]).stdout
    assert "JobState=CANCELLED" in shown
    nothing_left(small)
    assert not processes_below(run.directory)
