"""A report from what lies in a directory: plan, journal and logs of runs that are over."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.errors import BadInput, NothingRan
from cloudai_mbridge.report import build_report, judge_in, write_report
from cloudai_mbridge.report.terminal import render_table
from cloudai_mbridge.report.text import render_point, render_summary
from cloudai_mbridge.runner import Journal, Judgement
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict
from tests.cases import every
from tests.golden import Sentence
from tests.report.conftest import (
    EMBEDDED,
    SLURM,
    UPSTREAM,
    UPSTREAM_LOG,
    VIOLATION,
    ARun,
    a_log,
    some_point,
    some_rejected,
    some_report,
)

pytestmark = pytest.mark.process

COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0)
STEPS = 6


def _log(last: int = STEPS, **changes: Any) -> str:
    return a_log(last, **{"train_iters": STEPS, **changes})


@pytest.fixture
def run(tmp_path: Path) -> ARun:
    """A directory with two accepted points and a rejected one, planned and not yet run."""
    run = ARun(tmp_path / "r", EMBEDDED)
    assert run.keys == ["t/mb1/0", "t/mb2/0"]
    return run


@pytest.fixture
def root(run: ARun) -> Path:
    return run.root


def _ended(root: Path, key: str, status: JobStatus, log: str | None, *, number: int = 1, job_id: str = "17") -> None:
    journal = Journal(root / "journal.sqlite")
    journal.intend([(key, number)], "cafe")
    journal.submitted(key, number, job_id)
    journal.saw(key, number, status)
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
    assert (point.evidence, "Killed by the test" in point.last_lines) == ((), True)
    assert not any("MBRIDGE_STEP" in line for line in point.last_lines)


def test_a_run_that_was_never_submitted_is_no_success(root: Path) -> None:
    report = build_report(root)
    assert [str(point.verdict) for point in report.points] == ["unfinished", "unfinished", "rejected"]
    assert not report.succeeded
    assert not report.has_failed
    assert report.points[0].reasons == ("waits to be submitted",)
    assert "stdout.txt does not exist" in report.points[0].log["notes"]


def test_a_run_that_still_runs_is_no_success(root: Path) -> None:
    _ended(root, "t/mb1/0", JobStatus("RUNNING", JobClass.ACTIVE), _log())
    report = build_report(root)
    assert str(report.points[0].verdict) == "unfinished"
    assert not report.succeeded


def test_a_loss_that_is_no_number(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log(losses={"lm loss": float("nan")}))
    point = build_report(root).points[0]
    assert point.reasons[1:] == ("the loss is nan at step 1",)
    assert "nan_loss" in point.reasons[0]
    assert point.failure is not None
    assert (point.failure["id"], point.failure["kind"]) == ("nan_loss", "application")


def test_the_rejected_point_keeps_its_rule_and_operands(root: Path) -> None:
    point = build_report(root).points[2]
    assert (point.label, point.violations[0]["rule_id"]) == ("mb3", "C04")
    assert point.violations[0]["operands"] == {"gb": 8, "mb": 3, "dp": 2}
    assert point.reasons == (point.violations[0]["message"],)


def test_reporting_twice_gives_the_same(root: Path) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log())
    first, second = (build_report(root).to_dict() for _ in range(2))
    assert {**first, "created_at": "", "digest": ""} == {**second, "created_at": "", "digest": ""}


def test_a_run_of_several_attempts_is_judged_by_its_last(root: Path) -> None:
    journal = Journal(root / "journal.sqlite")
    key = "t/mb1/0"
    journal.intend([(key, 1)], "cafe")
    journal.submitted(key, 1, "17")
    journal.saw(key, 1, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, nodes="n1"))
    journal.failed(key, 1, "node_failure")
    journal.exclude("n1", "down (t/mb1/0)")
    journal.close()
    _ended(root, key, COMPLETED, _log(), number=2, job_id="18")
    report = build_report(root)
    point = report.points[0]
    assert str(point.verdict) == "success"
    assert [(each["number"], each["job_id"], each["state"], each["failure"]) for each in point.attempts] == [
        (1, "17", "NODE_FAIL", "node_failure"),
        (2, "18", "COMPLETED", ""),
    ]
    assert point.job == point.attempts[-1]
    assert report.excluded_nodes == {"n1": "down (t/mb1/0)"}


def test_a_skipped_run_says_why(root: Path) -> None:
    journal = Journal(root / "journal.sqlite")
    journal.decided("t/mb1/0", "skipped", ["t/mb2/0 failed"])
    journal.close()
    report = build_report(root)
    assert (str(report.points[0].verdict), report.points[0].reasons) == ("skipped", ("t/mb2/0 failed",))
    assert not report.succeeded


def test_a_hang_comes_with_the_stacks_of_its_ranks(root: Path) -> None:
    hung = JobStatus("HUNG", JobClass.FAILED, signal=15, reason="no step for 1801 s after step 3")
    _ended(root, "t/mb1/0", hung, _log(3))
    (root / "t/mb1/0/stacks").mkdir()
    stacks = "Timeout (0:00:01)!\n"
    for thread, frames in (("0x1", ["wait", "run"]), ("0x2", ["all_reduce", "main"])):
        stacks += f"Thread {thread} (most recent call first):\n" + "".join(f"  File {name}\n" for name in frames) + "\n"
    (root / "t/mb1/0/stacks/rank0.txt").write_text(stacks)
    point = build_report(root).points[0]
    assert str(point.verdict) == "failed"
    assert any("no step for 1801 s after step 3" in reason for reason in point.reasons)
    assert point.evidence[:2] == tuple(
        f"stacks/rank0.txt (1 of 1 rank):   File {name}" for name in ("all_reduce", "main")
    )


# What the runner is told


def _judged(run: ARun, status: JobStatus | None, stderr: str = "", log: str | None = None) -> Judgement:
    """Judge the run "t/mb1/0" after its job has ended so."""
    plan, root = run.plan.runs[0], run.root
    journal = Journal(root / "journal.sqlite")
    journal.intend([(plan.key, 1)], "cafe")
    if status is not None:
        journal.submitted(plan.key, 1, "17")
        journal.saw(plan.key, 1, status)
    (root / plan.key / "stderr.txt").write_text(stderr)
    if log is not None:
        (root / plan.key / "stdout.txt").write_text(log)
    judgement = judge_in(root)(plan, journal.entries()[plan.key])
    journal.close()
    return judgement


GPU_LOST = "gb200-7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, name=python3\n"
FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=1)


def test_a_good_run_is_judged_good(run: ARun) -> None:
    good = Judgement("success", (), is_success=True, step_time_s=0.5, step_time_error=0.0)
    assert _judged(run, COMPLETED, log=_log()) == good


FALLEN = GPU_LOST.replace("pid=1896, name=python3", "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
LARGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@every(
    "status, stderr, is_infrastructure, failure, nodes",
    [
        (FAILED, GPU_LOST, True, "gpu_lost", ("gb200-7",)),
        (FAILED, FALLEN, True, "gpu_lost", ("gb200-7",)),
        (FAILED, LARGE, False, "out_of_memory", ()),
        (FAILED, "nothing that is known\n", False, "unknown", ()),
        (JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE), "", True, None, None),
        (JobStatus("PREEMPTED", JobClass.INFRASTRUCTURE), "", True, None, None),
        (JobStatus("RECONFIG_FAIL", JobClass.INFRASTRUCTURE), "", True, None, None),
        (JobStatus("LOST", JobClass.INFRASTRUCTURE, reason="it has never started"), "", True, None, None),
        (JobStatus("CANCELLED", JobClass.CANCELLED, signal=15), GPU_LOST, False, None, None),
        (JobStatus("FORGOTTEN", JobClass.LOST), "", False, None, None),  # it may have run, or may still run
    ],
)
def test_whose_failure_it_is(
    status: JobStatus, stderr: str, is_infrastructure: bool, failure: str | None, nodes: Any, tmp_path: Path
) -> None:
    judgement = _judged(ARun(tmp_path / "r", EMBEDDED), status, stderr)
    assert (judgement.is_infrastructure, judgement.is_success) == (is_infrastructure, False)
    assert failure in (None, judgement.failure)
    assert nodes in (None, judgement.nodes)


def test_the_runner_and_the_report_agree(run: ARun) -> None:
    judgement = _judged(run, FAILED, GPU_LOST, _log(3))
    point = build_report(run.root).points[0]
    assert (judgement.verdict, judgement.reasons) == (str(point.verdict), point.reasons)
    assert point.failure is not None
    assert judgement.failure == point.failure["id"]


def test_a_directory_without_a_run(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        build_report(tmp_path)
    sentence(caught)


def test_a_directory_that_was_only_planned(root: Path, sentence: Sentence) -> None:
    (root / "journal.sqlite").unlink()
    with pytest.raises(NothingRan) as caught:
        build_report(root)
    sentence(caught)
    assert not (root / "journal.sqlite").exists()


@pytest.mark.parametrize("text", ['{"version": 1,', "[]", "{}", '{"version": 99, "scenario": "s"}'])
def test_a_damaged_plan_is_bad_input(root: Path, text: str) -> None:
    (root / "plan.json").write_text(text)
    with pytest.raises(BadInput):
        build_report(root)


def test_credentials_are_in_nothing_that_is_written(tmp_path: Path) -> None:
    url, image = "https://bob:hunter2@d.example/x", "docker://bob:hunter2@nvcr.io#nvidia/x:1"
    run = ARun(tmp_path / "r", {**UPSTREAM, "extra_env_vars": {"DATA": url}}, SLURM)
    died = JobStatus("FAILED", JobClass.FAILED, exit_code=1, reason=f"could not pull {image}", nodes="n1")
    log = f"RuntimeError: cannot open {url}\nWANDB_API_KEY=hunter2\n"
    log += "GET https://d.example/x?access_token=hunter2\ncurl -H 'x-api-key: hunter2'\nlogin(password=hunter2)\n"
    log += "RuntimeError: CUDA error with {'api_key': 'hunter2'} out of memory\n"
    run.ended("t/single/0", log, died, UPSTREAM_LOG)
    report = build_report(run.root)
    write_report(report, run.root)
    assert report.points[0].reasons
    assert report.points[0].evidence
    written = [*run.root.glob("report.*"), run.root / "junit.xml", run.root / "t/single/0/report.txt"]
    assert len(written) >= 5
    assert not [path.name for path in written if b"hunter2" in path.read_bytes()]
    assert "hunter2" not in str(report)
    assert judge_in(run.root)


@pytest.mark.parametrize("part", ["megatron_bridge", "mounted", "nemo_run"])
def test_a_plan_that_lacks_a_part_of_the_upstream_launcher_is_refused(
    upstream: ARun, sentence: Sentence, part: str
) -> None:
    plan = json.loads((upstream.root / "plan.json").read_text())
    for value in (None, ...):
        plan["runs"][0]["upstream"][part] = value
        if value is ...:
            del plan["runs"][0]["upstream"][part]
        (upstream.root / "plan.json").write_text(json.dumps(plan))
        with pytest.raises(BadInput, match=rf"runs\.(0\.)?upstream\.{part}") as caught:
            build_report(upstream.root)
        sentence(caught)


def test_a_number_that_no_report_can_hold_is_refused(root: Path, sentence: Sentence) -> None:
    plan = json.loads((root / "plan.json").read_text())
    for name in ("iteration", "num_steps", "warmup_steps"):
        damaged = {**plan, "runs": [{**plan["runs"][0], name: 10**400}]}
        (root / "plan.json").write_text(json.dumps(damaged))
        with pytest.raises(BadInput, match=rf"runs\.0\.{name}: ") as caught:
            build_report(root)
        sentence(caught)


def test_a_plan_that_lacks_a_part_of_a_run_is_refused(root: Path, sentence: Sentence) -> None:
    plan = json.loads((root / "plan.json").read_text())
    for part in ("args", "recipe"):
        damaged = {**plan, "runs": [{name: value for name, value in plan["runs"][0].items() if name != part}]}
        (root / "plan.json").write_text(json.dumps(damaged))
        with pytest.raises(BadInput, match=rf"runs\.{part}") as caught:
            build_report(root)
        sentence(caught)


def test_no_name_and_no_reason_controls_the_terminal() -> None:
    escape = "x\x1b[31mRED\x1b]0;t\x07\u202e"
    keys: dict[str, Any] = {"label": escape, "reasons": (escape,), "evidence": (escape,), "test_id": escape}
    point = some_point(Verdict.FAILED, **keys)
    rejected = some_rejected(violations=({**VIOLATION, "fact": escape, "operands": {escape: escape}},))
    report = some_report(
        point, rejected, scenario=escape, system=escape, notes=(escape,), excluded_nodes={escape: escape}
    )
    console = Console(file=io.StringIO(), width=300, force_terminal=False)
    console.print(render_table(report))
    shown = [console.file.getvalue(), render_summary(report), render_point(point, Path("/r"))]  # type: ignore[attr-defined]
    for text in shown:
        assert "RED" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_a_log_that_is_not_a_regular_file_fails_its_run_alone(root: Path, make: Callable[[Path], None]) -> None:
    _ended(root, "t/mb1/0", COMPLETED, _log())
    _ended(root, "t/mb2/0", COMPLETED, _log())
    for name in ("stdout.txt", "stderr.txt", "test.toml"):
        (root / "t/mb2/0" / name).unlink(missing_ok=True)
        make(root / "t/mb2/0" / name)
    good, bad, _ = build_report(root).points
    assert (str(good.verdict), str(bad.verdict)) == ("success", "failed")
    assert "not a regular file" in bad.log["notes"][0]


def test_records_of_another_job_are_not_of_the_run(root: Path) -> None:
    foreign = _log().replace('"version": 1', '"version": 1, "token": "fedcba9876543210"')
    _ended(root, "t/mb1/0", COMPLETED, foreign)
    point = build_report(root).points[0]
    assert (str(point.verdict), point.steps) == ("failed", ())
    assert "records that are not of this run's job were left out" in point.log["notes"][0]
