"""Judge a run: success, cause of failure, and whether to retry it: infrastructure failures, unless cancelled.

Success has three conditions: the job ended well, the log contains every requested step from the first that was to
be trained, and every loss is finite.
"""

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.logs import LogSummary
from cloudai_mbridge.logs.tail import last_lines, printable
from cloudai_mbridge.metrics import Metrics, first_step, implausible, missing_steps
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.schedulers.interface import NOT_LAUNCHED, JobClass, JobStatus
from cloudai_mbridge.training.credentials.scrub import redacted
from cloudai_mbridge.verdict.triage import Failure, FailureKind, failure_of, has_never_started, load_catalogue, triage

_HUNG_AT_ITS_END = "all steps were made, and the ranks did not end; see the ranks' stacks in stacks/"
LOST = "LOST"  # a job that was given up, and never started
_CANCELLED_BY_SLURM = "prolog_failed"  # a job that may not be requeued is cancelled, and its node drained
_OUT_OF_MEMORY = ("OUT_OF_MEMORY", 125)  # a Slurm code in place of a signal
# A program that could not be executed is a failure of the node or of the image
PROGRAM_MISSING = "program_missing"
_NOT_STARTED = (PROGRAM_MISSING, "job_not_launched", "job_launch_failed")
_TAIL = 5
_STACK_FILES = 4
_STACK_LINES = 12
_STACK_HEAD = "(most recent call first):\n"


class Verdict(StrEnum):
    """Outcome of a point. CANCELLED: mbridge ended it, or was stopped before its turn.

    UNFINISHED: a process drives the run, and the point has not ended. No report.json has it.
    """

    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class RunOutcome:
    """A run's verdict with every reason against it, and for a failure its evidence and its name."""

    verdict: Verdict
    reasons: tuple[str, ...]
    evidence: tuple[str, ...]
    failure: Failure | None = None


def judge(
    status: JobStatus | None,
    log: LogSummary,
    metrics: Metrics,
    num_steps: int,
    evidence: Sequence[str],
    *,
    needs_losses: bool = True,
) -> RunOutcome:
    """Judge a run; any missing data is a failure.

    num_steps: requested steps; 0 if the launcher decided, and then at least one must be measured.
    needs_losses: False for a log without losses, as the upstream launcher's may be.
    """
    if status is not None and status.job_class is JobClass.STOPPED:
        num_steps = 0  # it was to be stopped: steps measured until then are valid
    first = first_step(log.run, log.steps) if num_steps else 1
    reasons = [
        *_job_reasons(status),
        *([log.fault] if log.fault else []),
        *missing_steps(log.steps, num_steps, first),
        *implausible(log.steps, num_steps or None, log.run.get("device")),
    ]
    if needs_losses and (without := [step.step for step in log.steps if step.loss is None]):
        reasons.append(f"step {without[0]} has no loss")
    if bad := [step for step in log.steps if step.loss is not None and not math.isfinite(step.loss)]:
        reasons.append(f"the loss is {bad[0].loss} at step {bad[0].step}")
    if not reasons or log.steps:  # without steps, missing metrics follow from the reasons above
        # A rate of 0 is a launcher's sentinel for unknown, not a failure
        rates = [step.tflops_per_gpu for step in log.steps if step.step > metrics.warmup_steps]
        is_known = bool(rates) and all(rate is not None and math.isfinite(rate) for rate in rates)
        named = {"step time": metrics.step_time_s is not None, "TFLOP/s per GPU": is_known}
        reasons += [f"{name} could not be measured" for name, is_there in named.items() if not is_there]
    if not reasons:
        return RunOutcome(Verdict.SUCCESS, (), ())
    return RunOutcome(Verdict.FAILED, tuple(reasons), tuple(evidence))


def _job_reasons(status: JobStatus | None) -> list[str]:
    if status is None:
        return ["the job was not submitted, or its end is unknown"]
    if status.job_class in (JobClass.SUCCEEDED, JobClass.STOPPED):
        return []
    how = {
        JobClass.ACTIVE: "was last seen as",
        JobClass.UNKNOWN: "is in a state that proves nothing:",
        JobClass.LOST: "was given up in a state that proves nothing:",
    }.get(status.job_class, "ended as")
    details = []
    if status.signal == NOT_LAUNCHED:
        details.append(f"exit code 0:{NOT_LAUNCHED}")
    elif status.exit_code:
        details.append(f"exit code {status.exit_code}")
    if status.signal and status.signal != NOT_LAUNCHED and (status.state, status.signal) != _OUT_OF_MEMORY:
        is_known = status.signal in set(signal.Signals)
        details.append(f"signal {status.signal}, {signal.Signals(status.signal).name if is_known else 'unknown'}")
    if status.reason:
        details.append(status.reason)
    return [f"the job {how} {status.state}" + (f" ({'; '.join(details)})" if details else "")]


def with_failure(
    outcome: RunOutcome,
    status: JobStatus | None,
    log: LogSummary,
    paths: Sequence[Path],
    stacks: Path,
    num_steps: int | None = None,
) -> RunOutcome:
    """Return the outcome of a failed run with its cause, if the catalogue or a bad loss gives one.

    paths: its logs. stacks: the directory of its ranks' stacks, if they hung. num_steps: as in `judge`.
    """
    failure = triage(status, paths) or _bad_loss(log)
    if failure is None:
        return outcome
    if failure.id in _NOT_STARTED and not failure.nodes and status is not None:
        with suppress(BadInput):  # a job's script runs on the first of its nodes
            failure = replace(failure, nodes=tuple(expand_hostlist(status.nodes)[:1]))
    if status is not None and status.state == "HUNG":
        failure = replace(failure, evidence=(*_stacks(stacks), *failure.evidence))
        if num_steps and not missing_steps(log.steps, num_steps, first_step(log.run, log.steps)):
            failure = replace(failure, remedy=_HUNG_AT_ITS_END)
    others = outcome.reasons[:1] if not log.steps and has_never_started(status) else outcome.reasons  # the job's end
    reasons = (f"{failure.title} ({failure.id}); {failure.remedy}", *others)
    tail = [line for path in reversed(paths) for line in last_lines(path, _TAIL)] if failure.evidence else []
    return replace(outcome, reasons=reasons, evidence=(*failure.evidence, *tail) or outcome.evidence, failure=failure)


def _bad_loss(log: LogSummary) -> Failure | None:
    """Return the failure for a loss that is not finite, which may be in the log's records without an error line."""
    bad = [step for step in log.steps if step.loss is not None and not math.isfinite(step.loss)]
    if not bad:
        return None
    entry = next(entry for entry in load_catalogue() if entry.id == "nan_loss")
    return failure_of(entry, [f"step {step.step}: loss {step.loss}" for step in bad[:3]])


def _stacks(directory: Path) -> Iterator[str]:
    """Yield the last stacks of the main threads of a few ranks. A slow start may have left earlier stacks."""
    for path in islice(sorted(directory.glob("*.txt")), _STACK_FILES):
        try:
            text = read_regular(path).decode(errors="replace")
        except OSError:
            continue
        main_thread = text.rpartition(_STACK_HEAD)[2]  # Python writes it last
        for line in main_thread.splitlines()[:_STACK_LINES]:
            yield f"{directory.name}/{path.name}: {redacted(printable(line))}"


@dataclass(frozen=True)
class Judgement:
    """Result of an ended attempt for the runner. verdict: as in the report.

    failure: the id of what made it fail, "" if nothing did. nodes: the ones that the evidence names. are_suspects: all
    that is known of them is that a job could not start there. step_time_s: the capped mean. step_time_error: its
    standard error as a share, by the scatter of the steps; None if unknown.
    """

    verdict: str
    reasons: tuple[str, ...]
    is_success: bool
    failure: str = ""
    is_infrastructure: bool = False
    nodes: tuple[str, ...] = ()
    are_suspects: bool = False
    step_time_s: float | None = None
    step_time_error: float | None = None


def judgement_of(outcome: RunOutcome, status: JobStatus | None, metrics: Metrics) -> Judgement:
    """Return the judgement of an outcome. status: the job's last."""
    failure = outcome.failure
    is_lost = status is not None and status.state == LOST
    is_infrastructure = is_lost
    if status is not None and failure is not None and failure.kind is FailureKind.INFRASTRUCTURE:
        has_failed_itself = status.job_class in (JobClass.FAILED, JobClass.INFRASTRUCTURE)
        is_infrastructure |= has_failed_itself or failure.id == _CANCELLED_BY_SLURM
    unnamed = "lost" if is_lost else "unknown"
    times = metrics.step_time_s
    error = times.capped_std / times.capped_mean / math.sqrt(times.n - 1) if times and times.n > 1 else None
    return Judgement(
        verdict=str(outcome.verdict),
        reasons=tuple(map(redacted, outcome.reasons)),
        is_success=outcome.verdict is Verdict.SUCCESS,
        failure=(failure.id if failure else unnamed) if outcome.reasons else "",
        is_infrastructure=is_infrastructure,
        nodes=failure.nodes if failure else (),
        are_suspects=failure is not None and failure.id in _NOT_STARTED,
        step_time_s=times.capped_mean if times else None,
        step_time_error=error,
    )
