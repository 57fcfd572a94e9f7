"""Reports of every kind: made of values, and of the files of runs that are over."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.launch import write_plan, write_runs
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestScenario
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.training.process.log_lines import RUN_MARK, StepReport, render_record, render_step_record
from cloudai_mbridge.verdict import Verdict

# What a name, a reason or a log may hold, and every report has to show
NASTY = (
    "<script>alert(1)</script>",
    "a|b||c",
    "`code` ``x",
    "two\nlines",
    "[a](http://b.example) https://c.example www.d.example e@f.example",
    "@everyone #1 :smile: :+1:",
    "*b* _i_ ~~s~~ # h $x^2$ &amp; &#60; \\| <!-- -->",
    "\"quoted\" 'too' ]]> </pre></details>",
    "👩‍👩‍👧 emoji é 漢字",
    "/" + "directory/" * 30,
    "=1+1",
    "- dash",
    "1. one",
)
COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0, nodes="n[1-2]")
LOCAL = LocalSystem(name="here", scheduler="local")
SLURM = SlurmSystem.model_validate(
    {
        **{"name": "c", "scheduler": "slurm", "install_path": "/i", "default_partition": "main"},
        **{"gpus_per_node": 4, "partitions": [{"name": "main"}]},
    }
)
VIOLATION = {
    "rule_id": "C04",
    "where": "cmd_args.gb",
    "fact": "8 is not divisible by mb*dp = 6",
    "remedy": "use a multiple of 6",
    "operands": {"gb": 8, "mb": 3, "dp": 2},
    "message": "C04 cmd_args.gb: 8 is not divisible by mb*dp = 6 (gb=8, mb=3, dp=2); use a multiple of 6",
}
FORMULA = "megatron-bridge/new"
SAID: dict[str, Any] = {"flops_per_step": 2e9, "flops_formula": FORMULA, "memory_kind": "resident set"}


def some_point(verdict: Verdict = Verdict.SUCCESS, label: str = "tp1", num_steps: int = 4, **keys: Any) -> PointReport:
    """Return a run of test "sweep", or whatever `keys` say."""
    steps = tuple(StepRecord(i, float(i), 10.0 * i, 7.0 - i, 0.5, 1.5) for i in range(1, num_steps + 1))
    test_id, iteration = keys.get("test_id", "sweep"), keys.get("iteration", 0)
    data: dict[str, Any] = {
        **{"key": f"{test_id}/{label}/{iteration}", "test_id": test_id, "test_name": "t", "label": label},
        **{"iteration": iteration, "coordinates": {"tp": 1}, "verdict": verdict, "reasons": (), "evidence": ()},
        **{"violations": (), "args": {"gb": 8}, "num_nodes": 1, "world_size": 2, "num_steps": num_steps},
        **{"job": {}, "run": {}, "log": {}, "metrics": measure(steps, 2, 100.0, **SAID), "steps": steps},
    }
    return PointReport(**{**data, **keys})


def some_rejected(label: str = "tp9", **keys: Any) -> PointReport:
    nothing: dict[str, Any] = {"metrics": None, "steps": (), "args": {}, "num_nodes": None, "world_size": None}
    why = {"violations": (VIOLATION,), "reasons": (VIOLATION["message"],)}
    return some_point(Verdict.REJECTED, label, **{**nothing, **why, **keys})


def some_report(*points: PointReport, **keys: Any) -> RunReport:
    data = {"tool_version": "1", "scenario": "s", "system": "here", "created_at": "2026-01-02T03:04:05+00:00"}
    return RunReport(**{**data, **keys}, points=points)


def a_log(steps: int, record: dict[str, Any] | None = None, **changes: Any) -> str:
    """Return what a training of this many steps prints."""
    said = {"world_size": 2, "backend": "gloo", "device": "H100", "dtype": "bf16", "transformer_engine": True}
    said |= {"flops_per_step": 2e9, "flops_formula": FORMULA, "memory_kind": "accelerator, reserved"}
    lines = [render_record(RUN_MARK, {**said, **(record or {})})]
    for step in range(1, steps + 1):
        values: dict[str, Any] = {
            **{"step": step, "train_iters": steps, "step_time_s": 0.5, "tflops_per_gpu": 0.125},
            **{"consumed_samples": 8 * step, "global_batch_size": 8, "learning_rate": 0.001, "loss_scale": 1.0},
            **{"losses": {"lm loss": 7.0 - step / 8}, "grad_norm": 1.0, "num_zeros": None},
            **{"skipped_iterations": 0, "nan_iterations": 0, "peak_memory_gib": 1.0 + step / 8},
        }
        lines.append(render_step_record(StepReport(**{**values, **changes})))
    return "\n".join(lines) + "\n"


class ARun:
    """The directory of a run, written as `mbridge run` does, its jobs ended as the test says."""

    def __init__(self, root: Path, test: dict[str, Any], system: System = LOCAL, scenario: str = "s") -> None:
        root.mkdir(exist_ok=True)
        definition = TestDefinition.model_validate({"name": "n", "description": "d", **test})
        whole = TestScenario.model_validate({"name": scenario, "Tests": [{"id": "t", "test_name": "n"}]})
        self.root = root
        self.plan = build_plan(LoadedScenario(whole, [LoadedTest(whole.tests[0], definition)]), system)
        write_runs(self.plan, system, root)
        write_plan(self.plan, root)
        self.keys = [run.key for run in self.plan.runs]
        journal = Journal(root / "journal.sqlite")
        journal.plan(self.keys)
        journal.close()

    def ended(self, key: str, log: str, status: JobStatus = COMPLETED, log_name: str = "stdout.txt") -> None:
        journal = Journal(self.root / "journal.sqlite")
        journal.intend([(key, 1)], "cafe")
        journal.submitted(key, 1, "17")
        journal.saw(key, 1, status)
        journal.close()
        (self.root / key / log_name).write_text(log)


EMBEDDED: dict[str, Any] = {
    "cmd_args": {
        **{"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 2, "max_steps": 6},
        "mb": [1, 2, 3],
    },
    "metrics": {"warmup_steps": 2},
}
URL, COMMIT = "https://x.example/Megatron-Bridge.git", "0123456789abcdef0123456789abcdef01234567"
UPSTREAM: dict[str, Any] = {
    "cmd_args": {
        **{"model_family_name": "qwen", "model_recipe_name": "unknown_here", "num_gpus": 8, "max_steps": 6},
        **{"gpu_type": "h100", "hf_token": "hf_NeverToBeSeen", "container_image": "/images/mb.sqsh"},
    },
    "extra_cmd_args": {"optimizer.lr": "0.1", "dataset.num_tokens": "7"},
    "git_repos": [
        {"url": "https://x.example/Megatron-Bridge.git", "commit": COMMIT, "mount_as": "/opt/Megatron-Bridge"}
    ],
}
UPSTREAM_LOG = "cloudai_megatron_bridge_launcher.log"
TWO_LINES = "".join(f"Step Time : 1.2{i}s GPU utilization: 456.7MODEL_TFLOP/s/GPU\n" for i in range(1, 7))


@pytest.fixture
def embedded(tmp_path: Path) -> ARun:
    """Two accepted points, t/mb1/0 and t/mb2/0, and a rejected one."""
    return ARun(tmp_path / "embedded", EMBEDDED)


@pytest.fixture
def upstream(tmp_path: Path) -> ARun:
    """One point of the upstream launcher, t/single/0, that has run."""
    run = ARun(tmp_path / "upstream", UPSTREAM, SLURM)
    run.ended("t/single/0", TWO_LINES, log_name=UPSTREAM_LOG)
    return run


def as_json(report: RunReport) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    return data
