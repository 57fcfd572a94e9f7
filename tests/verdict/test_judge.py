"""Only a run that is good in every respect succeeds; any other says why not."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cloudai_mbridge.logs import LogSummary, StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import RunOutcome, Verdict, judge, with_failure
from tests.cases import every
from tests.golden import Sentence

NUM_STEPS, WARMUP = 6, 2
STATUSES: dict[str, JobStatus | None] = {
    "good": JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0),
    "not submitted": None,
    "refused": JobStatus("REFUSED", JobClass.FAILED, reason="no such partition"),
    "failed": JobStatus("FAILED", JobClass.FAILED, exit_code=3),
    "killed": JobStatus("FAILED", JobClass.FAILED, signal=9),
    "timeout": JobStatus("TIMEOUT", JobClass.FAILED),
    "node_fail": JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, reason="NodeDown"),
    "cancelled": JobStatus("CANCELLED", JobClass.CANCELLED),
    "active": JobStatus("RUNNING", JobClass.ACTIVE),
    "unknown": JobStatus("FORGOTTEN", JobClass.UNKNOWN),
    "lost": JobStatus("FORGOTTEN", JobClass.LOST, reason="given up after 300 s"),
    "hung": JobStatus("HUNG", JobClass.FAILED, signal=15, reason="no step for 1801 s after step 3"),
    "signal 125": JobStatus("FAILED", JobClass.FAILED, exit_code=1, signal=125),
    "out of memory": JobStatus("OUT_OF_MEMORY", JobClass.FAILED, exit_code=0, signal=125),
    "interrupted": JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped"),
}
STEPS: dict[str, list[int]] = {
    "good": [1, 2, 3, 4, 5, 6],
    "none": [],
    "cut": [1, 2, 3],
    "hole": [1, 2, 4, 5, 6],
    "late": [2, 3, 4, 5, 6],
}
LOSSES: dict[str, float | None] = {"good": 4.5, "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "missing": None}
RATES: dict[str, float | None] = {"good": 2.0, "missing": None, "nan": math.nan}


def _judge(status: str = "good", steps: str = "good", loss: str = "good", rate: str = "good") -> RunOutcome:
    """Judge a run whose step 4 has the given loss and rate."""
    records = tuple(
        StepRecord(step, 1.0, RATES[rate] if step == 4 else 2.0, LOSSES[loss] if step == 4 else 5.0)
        for step in STEPS[steps]
    )
    log = LogSummary(records, "records")
    return judge(STATUSES[status], log, measure(records, WARMUP, 100.0), NUM_STEPS, ["the last line"])


@every(
    ("first", "steps", "reason"),
    [
        (3, "3456", ""),
        (6, "6", ""),
        (3, "345", "3 of 4 steps from 3 on are in the log; the first missing is 6"),
        (3, "3 56", "3 of 4 steps from 3 on are in the log; the first missing is 4"),
        (3, "456", "3 of 4 steps from 3 on are in the log; the first missing is 3"),
        (3, "", "0 of 4 steps from 3 on are in the log; the first missing is 3"),
        (3, "23456", "5 of 6 steps are in the log; the first missing is 1"),  # which the record cannot be of
        (7, "", "nothing was left to train: the checkpoint is at step 6 of max_steps = 6; use more"),
        *(
            (no_number, "3456", "4 of 6 steps are in the log; the first missing is 1")
            for no_number in (None, True, "3")
        ),
        *((no_step, "3456", "4 of 6 steps are in the log; the first missing is 1") for no_step in (0, -1, 3.0, 10**16)),
    ],
)
def test_a_run_from_a_checkpoint_has_the_steps_behind_it(first: object, steps: str, reason: str) -> None:
    records = tuple(StepRecord(int(step), 1.0, 2.0, 5.0) for step in steps if step != " ")
    log = LogSummary(records, "records", {"first_iteration": first})
    outcome = judge(STATUSES["good"], log, measure(records, 0, 100.0), NUM_STEPS, [])
    assert outcome.reasons[:1] == ((reason,) if reason else ())
    assert (outcome.verdict is Verdict.SUCCESS) is (not reason)


@every("status", STATUSES)
@every("steps", STEPS)
@every("loss", LOSSES)
def test_the_whole_table(status: str, steps: str, loss: str) -> None:
    outcome = _judge(status, steps, loss)
    is_good = (status, steps) == ("good", "good") and loss == "good"
    assert (outcome.verdict is Verdict.SUCCESS) is is_good
    assert bool(outcome.reasons) is not is_good
    assert (outcome.evidence, outcome.last_lines) == ((), () if is_good else ("the last line",))


def test_a_rate_that_the_launcher_does_not_know_is_no_failure() -> None:
    """Megatron-Bridge prints 0.0 for hybrid models."""
    records = tuple(StepRecord(step, 1.0, 0.0, 5.0) for step in range(1, 7))
    metrics = measure(records, WARMUP, None)
    outcome = judge(STATUSES["good"], LogSummary(records, "lines"), metrics, NUM_STEPS, [])
    assert (outcome.verdict, outcome.reasons, metrics.tflops_per_gpu) == (Verdict.SUCCESS, (), None)


def test_a_run_without_measured_steps_is_no_success() -> None:
    records = tuple(StepRecord(step, 1.0, 1.0, 5.0) for step in (1, 2))
    outcome = judge(STATUSES["good"], LogSummary(records), measure(records, 2, None), 2, [])
    assert outcome.verdict is Verdict.FAILED
    assert outcome.reasons == ("step time could not be measured", "TFLOP/s per GPU could not be measured")


def test_a_run_of_no_steps_is_no_success() -> None:
    assert judge(STATUSES["good"], LogSummary(), measure((), 0, None), 0, []).verdict is Verdict.FAILED


CUT = "3 of 6 steps are in the log; the first missing is 4"


@every(
    ("of", "reasons"),
    [
        ({"rate": "missing"}, ("TFLOP/s per GPU could not be measured",)),
        ({"rate": "nan"}, ("TFLOP/s per GPU could not be measured",)),
        ({"status": "not submitted"}, ("the job was not submitted, or its end is unknown",)),
        ({"status": "refused"}, ("the job ended as REFUSED (no such partition)",)),
        ({"status": "failed"}, ("the job ended as FAILED (exit code 3)",)),
        ({"status": "node_fail"}, ("the job ended as NODE_FAIL (NodeDown)",)),
        ({"status": "active"}, ("the job was last seen as RUNNING",)),
        ({"status": "unknown"}, ("the job is in a state that proves nothing: FORGOTTEN",)),
        (
            {"status": "lost"},
            ("the job was given up in a state that proves nothing: FORGOTTEN (given up after 300 s)",),
        ),
        ({"status": "hung"}, ("the job ended as HUNG (signal 15, SIGTERM; no step for 1801 s after step 3)",)),
        ({"status": "interrupted"}, ("the job ended as INTERRUPTED (mbridge was stopped)",)),
        ({"status": "signal 125"}, ("the job ended as FAILED (exit code 1; signal 125, unknown)",)),
        ({"status": "out of memory"}, ("the job ended as OUT_OF_MEMORY",)),
        ({"steps": "cut"}, (CUT,)),
        ({"steps": "hole"}, ("5 of 6 steps are in the log; the first missing is 3",)),
        ({"steps": "late"}, ("5 of 6 steps are in the log; the first missing is 1",)),
        ({"loss": "nan"}, ("the loss is nan at step 4",)),
        ({"loss": "-inf"}, ("the loss is -inf at step 4",)),
        ({"loss": "missing"}, ("step 4 has no loss",)),
        ({"status": "killed", "steps": "cut"}, ("the job ended as FAILED (signal 9, SIGKILL)", CUT)),
        (  # without a step, missing measurements say nothing more
            {"status": "failed", "steps": "none"},
            ("the job ended as FAILED (exit code 3)", "0 of 6 steps are in the log; the first missing is 1"),
        ),
    ],
)
def test_every_reason_is_given(of: dict[str, str], reasons: tuple[str, ...]) -> None:
    outcome = _judge(**of)
    assert (outcome.verdict, outcome.reasons) == (Verdict.FAILED, reasons)


STOPPED = JobStatus("STOPPED", JobClass.STOPPED, signal=15, reason="client has ended (end_post_comp)")


@every(("num_measured", "is_good"), [(6, True), (4, True), (3, True), (2, False), (0, False)])
def test_what_was_to_be_stopped_is_judged_by_what_it_measured(num_measured: int, is_good: bool) -> None:
    records = tuple(StepRecord(step, 1.0, 2.0, 5.0) for step in range(1, num_measured + 1))
    outcome = judge(STOPPED, LogSummary(records, "records"), measure(records, WARMUP, 100.0), NUM_STEPS, [])
    assert (outcome.verdict is Verdict.SUCCESS) is is_good


def test_what_was_to_be_stopped_may_still_be_bad() -> None:
    records = tuple(StepRecord(step, 1.0, 2.0, math.nan) for step in range(1, 5))
    outcome = judge(STOPPED, LogSummary(records, "records"), measure(records, WARMUP, 100.0), NUM_STEPS, [])
    assert outcome.reasons == ("the loss is nan at step 1",)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            JobStatus("LAUNCH_FAILED", JobClass.INFRASTRUCTURE, signal=53, reason="JobLaunchFailure"),
            ("(job_not_launched); set output_path to ", "ended as LAUNCH_FAILED (exit code 0:53; JobLaunchFailure)"),
        ),
        (
            JobStatus("REFUSED", JobClass.FAILED, reason="the scheduler will never start it: PartitionTimeLimit"),
            ("(partition_time_limit); lower time_limit", "the job ended as REFUSED (the scheduler will never"),
        ),
    ],
)
def test_a_job_that_never_started_has_no_other_reasons(
    status: JobStatus, expected: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = judge(status, LogSummary(), measure((), 0, None), NUM_STEPS, [])
    reasons = with_failure(outcome, status, LogSummary(), [tmp_path / "stdout.txt"], tmp_path).reasons
    assert len(reasons) == 2
    assert all(words in reason for words, reason in zip(expected, reasons, strict=True))


def test_a_bad_loss_in_the_warm_up_counts() -> None:
    records = tuple(StepRecord(s, 1.0, 1.0, math.nan if s == 1 else 5.0) for s in range(1, 7))
    outcome = judge(STATUSES["good"], LogSummary(records), measure(records, 2, None), 6, [])
    assert outcome.reasons == ("the loss is nan at step 1",)


def test_steps_that_were_asked_for_and_are_missing_cost_nothing() -> None:
    records = tuple(StepRecord(step, 1.0, 1.0, 5.0) for step in (1, 2, 3))
    outcome = judge(STATUSES["good"], LogSummary(records), measure(records, 1, None), 10**15, [])
    assert outcome.reasons == (f"3 of {10**15} steps are in the log; the first missing is 4",)


@every(
    ("change", "words"),
    [
        ({"step": 6}, "step 6 is in the log; steps 1 to 5 were configured"),
        ({"tflops_per_gpu": -5.0}, "step 5: tflops_per_gpu = -5"),
        ({"step_time_s": 5e-324}, "step 5: step_time_s = 4.94066e-324 s is not possible"),
    ],
)
def test_what_cannot_be_true_is_no_success(change: dict[str, float], words: str) -> None:
    records = [StepRecord(step, 1.0, 1.0, 5.0) for step in range(1, 6)]
    records.append(replace(records.pop(), **change) if "step" not in change else StepRecord(6, 1.0, 1.0, 5.0))
    if "step" in change:
        records.insert(4, StepRecord(5, 1.0, 1.0, 5.0))
    outcome = judge(STATUSES["good"], LogSummary(tuple(records)), measure(records, 1, None), 5, [])
    assert outcome.verdict is Verdict.FAILED
    assert any(words in reason for reason in outcome.reasons)


@pytest.mark.parametrize("num_steps", [6, 7])
def test_a_run_that_hangs_after_its_last_step_is_not_called_slow(
    tmp_path: Path, sentence: Sentence, num_steps: int
) -> None:
    records = tuple(StepRecord(step, 1.0, 2.0, 5.0) for step in range(1, 7))
    log, hung = LogSummary(records, "records"), STATUSES["hung"]
    outcome = judge(hung, log, measure(records, WARMUP, None), num_steps, [])
    failure = with_failure(outcome, hung, log, (), tmp_path, num_steps).failure
    assert failure is not None
    sentence(failure.remedy)


def _stack(innermost: str, more: str = "") -> str:
    frames = f'  File "{innermost}\n  File "/x/train.py", line 7 in main\n'
    return (
        f'Timeout (0:27:00)!\nThread 0x00007f1{len(innermost):03x} (most recent call first):\n  File "a.py"{more}\n\n'
        + (f"Thread 0x00007f2{len(more):03x} (most recent call first):\n{frames}")
    )


WAITS, LOADS, SAVES = 'dist.py", line 3 in all_reduce', 'loader.py", line 9 in __next__', 'save.py", line 1 in save'


def _hang(directory: Path, stacks: dict[int, str]) -> list[str]:
    """Return the evidence of a hang whose ranks left these stacks."""
    directory = directory / "stacks"
    directory.mkdir()
    for rank, text in stacks.items():
        (directory / f"rank-{rank}.txt").write_text(text)
    hung = STATUSES["hung"]
    failure = with_failure(_judge("hung", "none"), hung, LogSummary(), (), directory, NUM_STEPS).failure
    assert failure is not None
    return list(failure.evidence)


def test_the_stack_of_the_odd_rank_is_shown_first(tmp_path: Path) -> None:
    """Whatever its number is: by name, rank 517 stands behind 500 others."""
    waiting = {rank: _stack(WAITS, f" {rank}") for rank in range(1000)}
    lines = _hang(tmp_path, waiting | {517: _stack(LOADS), 4: _stack(SAVES), 9: _stack(SAVES)})
    assert lines == [
        'stacks/rank-517.txt (1 of 1000 ranks):   File "loader.py", line 9 in __next__',
        'stacks/rank-517.txt (1 of 1000 ranks):   File "/x/train.py", line 7 in main',
        'stacks/rank-4.txt (2 of 1000 ranks):   File "save.py", line 1 in save',
        'stacks/rank-4.txt (2 of 1000 ranks):   File "/x/train.py", line 7 in main',
        'stacks/rank-0.txt (997 of 1000 ranks):   File "dist.py", line 3 in all_reduce',
        'stacks/rank-0.txt (997 of 1000 ranks):   File "/x/train.py", line 7 in main',
    ]


def test_a_rank_that_left_no_stack_is_odd_too(tmp_path: Path) -> None:
    lines = _hang(tmp_path, {rank: "" if rank == 2 else _stack(WAITS) for rank in range(16)})
    assert lines[0] == "stacks/rank-2.txt (1 of 16 ranks): no stack was written"


def test_of_many_different_stacks_a_few_are_shown(tmp_path: Path) -> None:
    lines = _hang(tmp_path, {rank: _stack(f'f{rank}.py", line 1 in f') for rank in range(12)})
    assert [line.partition(" ")[0] for line in lines[::2]] == [f"stacks/rank-{rank}.txt" for rank in range(4)]


def test_a_hang_before_the_ranks_names_no_stacks(tmp_path: Path, sentence: Sentence) -> None:
    hung = STATUSES["hung"]
    failure = with_failure(_judge("hung", "none"), hung, LogSummary(), (), tmp_path / "stacks", NUM_STEPS).failure
    assert failure is not None
    sentence(failure.remedy)


@every(
    ("text", "evidence"),
    [
        ("W1129 a warning\nValueError: num_layers is odd\nmore\n", ("stderr.txt:2: ValueError: num_layers is odd",)),
        ("W1129 a warning\nmore\n", ()),
    ],
)
def test_the_last_lines_are_no_evidence(tmp_path: Path, text: str, evidence: tuple[str, ...]) -> None:
    log = tmp_path / "stderr.txt"
    log.write_text(text)
    outcome = with_failure(_judge("failed", "cut"), STATUSES["failed"], LogSummary(), [log], tmp_path / "stacks")
    assert outcome.evidence == evidence
    assert outcome.last_lines == (tuple(text.splitlines()) if evidence else ("the last line",))
