"""Judge a run: success, cause of failure, and whether to retry it: infrastructure failures, unless cancelled.

Success has three conditions: the job ended well, the log contains every requested step from the first that was to
be trained, and every loss is finite.
"""

import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.logs import SKIPPED, LogSummary
from cloudai_mbridge.logs.tail import last_lines, printable
from cloudai_mbridge.metrics import Metrics, counted_steps, first_step, implausible, missing_steps
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.schedulers.interface import NOT_LAUNCHED, JobClass, JobStatus
from cloudai_mbridge.training.credentials.scrub import redacted
from cloudai_mbridge.verdict.triage import (
    Failure,
    FailureKind,
    accuses_its_node,
    failure_of,
    has_never_started,
    is_of_the_script,
    load_catalogue,
    triage,
)

_HUNG_AT_ITS_END = "all steps were made, and the ranks did not end; see the ranks' stacks in stacks/"
_HUNG_BEFORE_ITS_RANKS = (
    "no rank left a stack: see in the log how far its start came (container, imports, rendezvous);"
    " raise runner.hang_timeout_s if the start is that slow"
)
LOST = "LOST"  # a job that was given up, and never started
_CANCELLED_BY_SLURM = "prolog_failed"  # a job that may not be requeued is cancelled, and its node drained
_OUT_OF_MEMORY = ("OUT_OF_MEMORY", 125)  # a Slurm code in place of a signal
# A program that could not be executed is a failure of the node or of the image
PROGRAM_MISSING = "program_missing"
_TAIL = 5
_STACKS = 4
_LONGEST_RANK = 10  # digits
_STACK_LINES = 12
_STACK_HEAD = "(most recent call first):\n"
_NO_STACK = "no stack was written"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Verdict(StrEnum):
    """Outcome of a point. CANCELLED: mbridge ended it, or was stopped before its turn.

    UNFINISHED: the point has not ended, or nothing proves that it has. No report.json has it.
    """

    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class RunOutcome:
    """A run's verdict with every reason against it, and for a failure its evidence and its name.

    evidence: the lines that show the failure. last_lines: of its logs, whatever they are about. is_unstarted: it could
    not start on the failure's nodes, by the evidence, and might have on others.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    failure: Failure | None = None
    is_unstarted: bool = False
    last_lines: tuple[str, ...] = ()


def judge(
    status: JobStatus | None,
    log: LogSummary,
    metrics: Metrics,
    num_steps: int,
    last_lines: Sequence[str],
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
    done = [step for step in log.steps if step.left_out != SKIPPED]
    if needs_losses and (without := [step.step for step in done if step.loss is None]):
        reasons.append(f"step {without[0]} has no loss")
    if bad := [step for step in log.steps if step.loss is not None and not math.isfinite(step.loss)]:
        reasons.append(f"the loss is {bad[0].loss} at step {bad[0].step}")
    if not reasons or log.steps:  # without steps, missing metrics follow from the reasons above
        # A rate of 0 is a launcher's sentinel for unknown, not a failure
        rates = [step.tflops_per_gpu for step in counted_steps(log.steps, metrics.warmup_steps)]
        is_known = bool(rates) and all(rate is not None and math.isfinite(rate) for rate in rates)
        named = {"step time": metrics.step_time_s is not None, "TFLOP/s per GPU": is_known}
        reasons += [f"{name} could not be measured" for name, is_there in named.items() if not is_there]
    if not reasons:
        return RunOutcome(Verdict.SUCCESS, ())
    return RunOutcome(Verdict.FAILED, tuple(reasons), last_lines=tuple(last_lines))


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
    *,
    has_records: bool = True,
) -> RunOutcome:
    """Return the outcome of a failed run with its cause, if the catalogue or a bad loss gives one.

    paths: its logs. stacks: the directory of its ranks' stacks, if they hung. num_steps: as in `judge`.
    has_records: False for a launcher that does not record the start of its ranks.
    """
    failure = triage(status, paths) or _bad_loss(log)
    if failure is None:
        return outcome
    is_unstarted = status is not None and _is_unstarted(failure, status, log, has_records=has_records)
    if is_unstarted and not failure.nodes and status is not None:
        failure = replace(failure, nodes=_where_it_failed(failure, status))
    if status is not None and status.state == "HUNG":
        shown = tuple(_stacks(stacks))
        failure = replace(failure, evidence=(*shown, *failure.evidence))
        if num_steps and not missing_steps(log.steps, num_steps, first_step(log.run, log.steps)):
            failure = replace(failure, remedy=_HUNG_AT_ITS_END)
        elif not shown and has_records:
            failure = replace(failure, remedy=_HUNG_BEFORE_ITS_RANKS)
    others = outcome.reasons[:1] if not log.steps and has_never_started(status) else outcome.reasons  # the job's end
    reasons = (f"{failure.title} ({failure.id}); {failure.remedy}", *others)
    last = tuple(line for path in reversed(paths) for line in last_lines(path, _TAIL)) if failure.evidence else None
    return replace(
        outcome,
        reasons=reasons,
        evidence=failure.evidence,
        failure=failure,
        is_unstarted=is_unstarted,
        last_lines=outcome.last_lines if last is None else last,
    )


def _is_unstarted(failure: Failure, status: JobStatus, log: LogSummary, *, has_records: bool) -> bool:
    """Return whether a job could not start on a node, by the evidence: its script never began, or no rank wrote the
    record of its start, and the cause is one that a node may have for itself."""
    if has_never_started(status):
        return failure.kind is FailureKind.INFRASTRUCTURE
    if log.run or log.steps or status.job_class not in (JobClass.FAILED, JobClass.INFRASTRUCTURE):
        return False
    return accuses_its_node(failure, needs_starter=not has_records)


def _where_it_failed(failure: Failure, status: JobStatus) -> tuple[str, ...]:
    """Return the node of a job that could not start, if it has one only, or its script failed, which its first runs."""
    try:
        nodes = tuple(expand_hostlist(status.nodes))
    except BadInput:
        return ()
    return nodes[:1] if len(nodes) == 1 or has_never_started(status) or is_of_the_script(failure) else ()


def _bad_loss(log: LogSummary) -> Failure | None:
    """Return the failure for a loss that is not finite, which may be in the log's records without an error line."""
    bad = [step for step in log.steps if step.loss is not None and not math.isfinite(step.loss)]
    if not bad:
        return None
    entry = next(entry for entry in load_catalogue() if entry.id == "nan_loss")
    return failure_of(entry, [f"step {step.step}: loss {step.loss}" for step in bad[:3]])


def _stacks(directory: Path) -> Iterator[str]:
    """Yield the last stacks of the main threads, those that the fewest ranks share first, with how many these are.

    Ranks that wait for another all stand in the same call; the one that they wait for stands elsewhere.
    """
    ranks_at: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*.txt"), key=_rank):
        try:
            text = read_regular(path).decode(errors="replace")
        except OSError:
            continue
        main_thread = text.rpartition(_STACK_HEAD)[
            2
        ]  # Python writes it last; a slow start may have left earlier stacks
        ranks_at.setdefault(_ADDRESS.sub("0x", main_thread.strip("\n")), []).append(path)
    total = sum(map(len, ranks_at.values()))
    for text, paths in sorted(ranks_at.items(), key=lambda item: len(item[1]))[:_STACKS]:
        where = f"{directory.name}/{paths[0].name} ({len(paths)} of {counted(total, 'rank')})"
        for line in text.splitlines()[:_STACK_LINES] or [_NO_STACK]:
            yield f"{where}: {redacted(printable(line))}"


def _rank(path: Path) -> tuple[int, str]:
    """Return the place of a stack's file in the order of ranks."""
    number = path.stem.rpartition("-")[2]
    return (int(number) if number.isascii() and number.isdigit() and len(number) < _LONGEST_RANK else 0), path.name


@dataclass(frozen=True)
class Judgement:
    """Result of an ended attempt for the runner. verdict: as in the report.

    failure: the id of what made it fail, "" if nothing did. nodes: the ones that the evidence names. are_suspects: all
    that is known of them is that a job could not start there, as it might elsewhere. step_time_s: the capped mean.
    step_time_error: its standard error as a share, by the scatter of the steps; None if unknown.
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
        are_suspects=outcome.is_unstarted and failure is not None and bool(failure.nodes),
        step_time_s=times.capped_mean if times else None,
        step_time_error=error,
    )
