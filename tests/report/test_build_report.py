"""A report from what lies in a directory: plan, journal and logs of runs that are over."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.jobs import JobClass, JobStatus
from cloudai_mbridge.launch import write_runs
from cloudai_mbridge.models.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import Scenario
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.plan import SweepPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.report import build_report, write_report
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.training.utils.log_lines import RUN_MARK, StepReport, render_record, render_step_record

LOCAL = LocalSystem(name="here", scheduler="local")
COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0)
STEPS = 6


def _plan() -> SweepPlan:
    definition = MegatronBridgeTestDefinition.model_validate(
        {
            "name": "n",
            "description": "d",
            "cmd_args": {
                "launcher": "embedded",
                "model_recipe_name": "gpt_tiny",
                "num_gpus": 2,
                "max_steps": STEPS,
                "mb": [1, 2, 3],
            },
            "metrics": {"warmup_steps": 2},
        }
    )
    scenario = Scenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "n"}]})
    return build_plan(LoadedScenario(scenario, [LoadedTest(scenario.tests[0], definition)]), LOCAL)


def _log(last: int = STEPS, **changes: Any) -> str:
    lines = [render_record(RUN_MARK, {"world_size": 2, "backend": "gloo"})]
    for step in range(1, last + 1):
        values: dict[str, Any] = {
            "step": step,
            "train_iters": STEPS,
            "step_time_s": 0.5,
            "tflops_per_gpu": 0.125,
            "consumed_samples": 8 * step,
            "global_batch_size": 8,
            "learning_rate": 0.001,
            "loss_scale": 1.0,
            "losses": {"lm loss": 7.0 - step / 8},
            "grad_norm": 1.0,
            "num_zeros": None,
            "skipped_iterations": 0,
            "nan_iterations": 0,
        }
        lines.append(render_step_record(StepReport(**{**values, **changes})))
    return "\n".join(lines) + "\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with two accepted points and a rejected one, planned and not yet run."""
    plan = _plan()
    assert [run.key for run in plan.runs] == ["t/mb1/0", "t/mb2/0"]
    write_runs(plan, LOCAL, tmp_path)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.plan(run.key for run in plan.runs)
    journal.close()
    return tmp_path


def _ended(root: Path, key: str, status: JobStatus, log: str | None) -> None:
    journal = Journal(root / "journal.sqlite")
    journal.submitted(key, "17")
    journal.saw(key, status)
    journal.close()
    if log is not None:
        (root / key / "stdout.txt").write_text(log)


def test_a_good_run(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log())
    _ended(root, "t/mb2/0", COMPLETED, _log())
    report = build_report(root)
    assert [str(point.verdict) for point in report.points] == ["success", "success", "rejected"]
    assert report.succeeded
    point = report.points[0]
    assert (point.world_size, point.num_steps, point.run["backend"], point.job["job_id"]) == (2, STEPS, "gloo", "17")
    assert point.metrics is not None
    assert point.metrics.window == (3, STEPS)
    assert point.metrics.step_time_s is not None
    assert (point.metrics.step_time_s.mean, point.metrics.step_time_s.n) == (0.5, STEPS - 2)
    assert point.metrics.tokens_per_s_per_gpu is not None
    assert point.metrics.tokens_per_s_per_gpu.mean == 8 * 64 / 2 / 0.5
    assert [step.loss for step in point.steps] == [7.0 - step / 8 for step in range(1, STEPS + 1)]
    data = json.loads(write_report(report, root).read_text())
    assert data["points"][0]["metrics"]["step_time_s"]["mean"] == 0.5
    assert (root / "t/mb1/0/report.txt").read_text().startswith("Source log: ")


def test_a_killed_run_has_the_end_of_its_logs(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log())
    _ended(root, "t/mb2/0", JobStatus("FAILED", JobClass.FAILED, signal=9), _log(3))
    (root / "t/mb2/0/stderr.txt").write_text("Traceback\nKilled by the test\n")
    report = build_report(root)
    assert not report.succeeded
    point = report.points[1]
    assert str(point.verdict) == "failed"
    assert "SIGKILL" in point.reasons[0]
    assert "3 of 6 steps are in the log; the first missing is 4" in point.reasons
    assert "Killed by the test" in point.evidence
    assert any("MBRIDGE_STEP" in line for line in point.evidence)


def test_a_run_that_was_never_submitted_is_no_success(root: Path) -> None:
    report = build_report(root)
    assert [str(point.verdict) for point in report.points] == ["failed", "failed", "rejected"]
    assert report.points[0].reasons[0] == "the job was not submitted, or its end is unknown"
    assert "stdout.txt does not exist" in report.points[0].log["notes"]


def test_a_run_that_still_runs_is_no_success(root: Path) -> None:
    _ended(root, "t/mb1/0", JobStatus("RUNNING", JobClass.ACTIVE), _log())
    assert str(build_report(root).points[0].verdict) == "failed"


def test_a_loss_that_is_no_number(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log(losses={"lm loss": float("nan")}))
    point = build_report(root).points[0]
    assert point.reasons == ("the loss is nan at step 1",)


def test_the_rejected_point_keeps_its_rule_and_operands(root: Path) -> None:
    point = build_report(root).points[2]
    assert (point.label, point.violations[0]["rule_id"]) == ("mb3", "C04")
    assert point.violations[0]["operands"] == {"gb": 8, "mb": 3, "dp": 2}
    assert point.reasons == (point.violations[0]["message"],)


def test_reporting_twice_gives_the_same(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log())
    first, second = (build_report(root).to_dict() for _ in range(2))
    assert {**first, "created_at": ""} == {**second, "created_at": ""}


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run"):
        build_report(tmp_path)


def test_a_directory_that_was_only_planned(tmp_path: Path) -> None:
    write_runs(_plan(), LOCAL, tmp_path)
    with pytest.raises(BadInput, match="never run"):
        build_report(tmp_path)
    assert not (tmp_path / "journal.sqlite").exists()


@pytest.mark.parametrize("text", ['{"version": 1,', "[]", "{}", '{"version": 99, "scenario": "s"}'])
def test_a_damaged_plan_is_bad_input(root: Path, text: str) -> None:
    (root / "plan.json").write_text(text)
    with pytest.raises(BadInput):
        build_report(root)
