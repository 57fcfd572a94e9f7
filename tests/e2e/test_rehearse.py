"""The real program of the rehearsal, on a real cluster: what no rule knows is found before anything is submitted."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence
from tests.sandbox import SlurmSandbox

pytestmark = pytest.mark.slurm
pytest.importorskip("torch")

SYSTEM = """name = "c"
scheduler = "slurm"
default_partition = "main"
monitor_interval = 0.3
gpus_per_node = 4
gpu_type = "h100"
python_executable = "{python}"
[[partitions]]
name = "main"
[global_env_vars]
OMP_NUM_THREADS = "1"
OWN = "a $HOME"
"""
# Megatron-Core has it with FlashAttention only, which no rule of ours knows
MISTAKE = '[Tests.extra_cmd_args]\n"model.batch_invariant_mode" = "true"\n'


# The package of a kernel that the image lacks
NO_PACKAGE = '[Tests.extra_cmd_args]\n"model.moe_token_dispatcher_type" = "flex"\n'


def a_test(name: str, more: str = "", recipe: str = "gpt_tiny") -> str:
    return f"""
[[Tests]]
id = "{name}"
name = "{name}"
description = "a tiny model"
test_template_name = "MegatronBridge"
num_nodes = 1
time_limit = "00:10:00"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "{recipe}"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 4
tp = 2
{more}
"""


def jobs(cluster: SlurmSandbox) -> str:
    """Return the ids and names of all jobs that the controller remembers."""
    return cluster.run("squeue", "--noheader", "--states=all", "--format=%i %j").stdout


def start(start_run: Any, cluster: SlurmSandbox, command: str, *tests: str, args: Any = (), python: str = "") -> Any:
    system = SYSTEM.format(python=python or sys.executable)
    return start_run(cluster, tests, command=command, whole_system=system, args=args)


def test_a_mistake_that_no_rule_knows_is_never_submitted(
    start_run: Any, cluster: SlurmSandbox, sentence: Sentence
) -> None:
    before = jobs(cluster)
    run = start(start_run, cluster, "run", a_test("bad", MISTAKE), args=["--rehearse"]).finish(1)
    assert jobs(cluster) == before
    assert not (run.directory / "out").exists()
    words = r"(?<=ConfigError: ).*?(?= \(AssertionError\))"
    sentence(run.stdout, words=words, line=r"(?<=\.py:)\d+", core=r"(?<=core=)[\w.]+|(?<=Megatron-Core )[\d.]+\d")
    dry = start(start_run, cluster, "dry-run", a_test("bad", MISTAKE), args=["--rehearse", "--json"]).finish(1)
    document = json.loads(dry.stdout)
    assert (document["path"], document["rule_counts"]) == (None, {"R01": 1})
    assert not (dry.directory / "out").exists()


def test_a_step_is_rehearsed_before_the_run(start_run: Any, cluster: SlurmSandbox) -> None:
    """Of the points, one needs a package that is not there, and one runs."""
    before = len(jobs(cluster).splitlines())
    tests = (a_test("flex", NO_PACKAGE, "moe_tiny"), a_test("good"))
    run = start(start_run, cluster, "run", *tests, args=["--rehearse=step"]).finish(1)
    assert len(jobs(cluster).splitlines()) == before + 1
    (broken,) = run.point("flex")["violations"]
    assert broken["rule_id"] == "R01"
    assert "deep_ep" in broken["message"]
    points = json.loads((run.root / "rehearsal.json").read_text())["points"]
    found = {each["test_id"]: [event["event"] for event in each["others"]] for each in points}
    assert found == {"flex": [], "good": ["step", "step", "pipeline", "matched"]}


def test_the_rest_runs_and_the_report_says_what_was_rehearsed(start_run: Any, cluster: SlurmSandbox) -> None:
    tests = (a_test("good"), a_test("bad", MISTAKE))
    run = start(start_run, cluster, "run", *tests, args=["--rehearse"]).finish(1)
    assert run.point("good")["verdict"] == "success", run.stdout
    assert [each["rule_id"] for each in run.point("bad")["violations"]] == ["R01"]
    found = [(each["test_id"], each["verdict"], each["built"]) for each in run.report["rehearsed"]]
    assert found == [("good", "starts", 2), ("bad", "refused", 0)]
    shown = run.command("show").finish(0)
    assert "Rehearsed before the run" in shown.stdout


def test_on_slurm_it_is_one_core_of_one_node(start_run: Any, cluster: SlurmSandbox) -> None:
    tests = (a_test("good"), a_test("bad", MISTAKE))
    run = start(start_run, cluster, "rehearse", *tests, args=["--on-slurm", "--json"]).finish(1)
    document = json.loads(run.stdout)
    assert document["is_on_slurm"] is True
    assert [(each["verdict"], len(each["built"])) for each in document["points"]] == [("starts", 2), ("refused", 0)]
    assert not (run.directory / "out").exists()
    names = [line.split()[0] for line in jobs(cluster).splitlines() if "mbridge-rehearsal-" in line]
    shown = cluster.run("scontrol", "show", "job", names[-1]).stdout
    assert "NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1" in shown
    assert "TimeLimit=00:30:00" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_job(
    number: signal.Signals,
    start_run: Any,
    cluster: SlurmSandbox,
    tmp_path: Path,
    until: Callable[..., Any],
    nothing_left: Callable[[SlurmSandbox], None],
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\ntouch {tmp_path}/began\nsleep 1000\n'
    )
    python.chmod(0o755)
    run = start(start_run, cluster, "rehearse", a_test("a"), args=["--on-slurm"], python=str(python))
    until("the program", lambda: (tmp_path / "began").exists() or run.returncode is not None)
    run.send(number)
    run.finish(128 + number)
    nothing_left(cluster)
    assert not (run.directory / "out").exists()
