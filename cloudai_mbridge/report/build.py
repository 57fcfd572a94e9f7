"""Build a report from the files in a run's directory: plan, journal, logs. The run itself need not be alive."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import Damaged, NothingRan, counted
from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.logs import LogSummary, StepRecord, read_log
from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.metrics import Metrics, measure
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan
from cloudai_mbridge.plan.launchers import launcher_of
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.report.comparability import compare_by
from cloudai_mbridge.report.environment import definitions_of, machine_environment, run_environment
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.searches import in_words, is_untried, read_searches
from cloudai_mbridge.runner import Judge
from cloudai_mbridge.runner.journal import Attempt, Journal, JournalEntry, SubmissionLog
from cloudai_mbridge.schedulers.interface import SUBMITTED, JobClass
from cloudai_mbridge.training.credentials.scrub import redacted_in
from cloudai_mbridge.verdict import Judgement, RunOutcome, Verdict, judge, judgement_of, with_failure
from cloudai_mbridge.version import __version__

EVIDENCE_LINES = 15


def build_report(root: Path, held_by: str | None = None) -> RunReport:
    """Read a run's directory. Everything that looks like a credential is redacted, except in names of points.

    held_by: the process that drives the run: the report contains the results so far, as its first note states.

    BadInput: not a run's directory, or an unreadable one; nothing was submitted.
    """
    plan = read_plan_data(root)
    refuse_dry_run(root, plan)
    past = _read_journal(root, held_by)
    if (lacking := _lacking(plan)) is not None:
        raise Damaged(f"{root / ROOT_FILES.plan}: is damaged (it lacks {lacking}); restore the file")
    points = [
        _report_run(run, entry, root, plan)
        for run in plan["runs"]
        if not is_untried(entry := past.entry(run["key"])) and not (held_by and _awaits_search(run, entry))
    ]
    points += [_report_rejected(point) for point in plan["rejected"]]
    points = [_without_credentials(point) for point in points]
    searches = tuple(read_searches(plan["runs"], past.entries, filter(_has_ended, points)))
    return RunReport(
        tool_version=__version__,
        scenario=plan["scenario"],
        system=plan["system"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        points=tuple(points),
        num_rejected=plan["num_rejected"],
        rule_counts=plan["rule_counts"],
        notes=redacted_in((*_so_far(points, held_by), *plan["notes"], *map(in_words, searches), *past.damage)),
        excluded_nodes=redacted_in(past.excluded),
        tests=tuple(plan["tests"]),
        environment=machine_environment(),
        searches=searches,
        left_out=tuple(_left_out(plan.get("left_out", ()))),
    )


def _left_out(points: Sequence[Mapping[str, str]]) -> Iterator[LeftOut]:
    for point in points:
        yield LeftOut(point["test_id"], point["label"], redacted_in(point["reason"]))


_OF_THE_PLAN = ("system", "runs", "rejected", "scenario", "num_rejected", "rule_counts", "notes", "tests")
_OF_A_RUN = (
    *("key", "test_id", "test_name", "label", "iteration", "coordinates", "args", "recipe", "num_nodes"),
    *("ranks_per_node", "num_steps", "warmup_steps", "container_image", "is_pre_test"),
)
_OF_AN_UPSTREAM = ("megatron_bridge", "mounted", "nemo_run")
_OF_A_REJECTED_POINT = ("test_id", "test_name", "label", "coordinates", "violations")


def _lacking(plan: Mapping[str, Any]) -> str | None:
    """Return the first missing part of a plan, None if it is complete."""
    if found := next((name for name in _OF_THE_PLAN if name not in plan), None):
        return found
    parts = [(run, name, f"runs.{name}") for run in plan["runs"] for name in _OF_A_RUN]
    upstreams = [run["upstream"] for run in plan["runs"] if run.get("upstream") is not None]
    parts += [(upstream, name, f"runs.upstream.{name}") for upstream in upstreams for name in _OF_AN_UPSTREAM]
    parts += [(point, name, f"rejected.{name}") for point in plan["rejected"] for name in _OF_A_REJECTED_POINT]
    return next((name for table, key, name in parts if key not in table), None)


_CANNOT_HOLD_ANY = ("key", "test_id", "label", "verdict", "metrics", "steps", "comparability")


def _without_credentials(point: PointReport) -> PointReport:
    """Return a point with its texts redacted; its comparability fields were redacted before they were hashed."""
    texts = [each.name for each in fields(point) if each.name not in _CANNOT_HOLD_ANY]
    return replace(point, **{name: redacted_in(getattr(point, name)) for name in texts})


def judge_in(root: Path) -> Judge:
    """Return a function that judges a run of this directory as the report does."""

    def judge_run(run: RunPlan, entry: JournalEntry) -> Judgement:
        *_, metrics, outcome = _read_run(asdict(run), entry, root)
        return judgement_of(outcome, entry.last.status if entry.last else None, metrics)

    return judge_run


@dataclass(frozen=True)
class _Past:
    """What a run's journal says. was_stopped: what has no job was not to be submitted any more.

    is_driven: a process drives the run, and what has no verdict has not ended.
    """

    entries: Mapping[str, JournalEntry]
    excluded: Mapping[str, str]
    was_stopped: bool
    is_driven: bool = False

    @property
    def damage(self) -> tuple[str, ...]:
        entries = self.entries.values()
        return tuple(f"{ROOT_FILES.journal}: {entry.key}: {text}" for entry in entries for text in entry.damage)

    def entry(self, key: str) -> JournalEntry | None:
        """Return a run's entry, with a verdict if it was cancelled before it had a job, or has not ended."""
        entry = self.entries.get(key)
        if self.is_driven and (entry is None or entry.verdict is None):
            return replace(
                entry or JournalEntry(key, None, (), ()), verdict=Verdict.UNFINISHED, reasons=(_state(entry),)
            )
        if entry is not None and self.was_stopped and entry.verdict is None and not entry.attempts:
            return replace(entry, verdict=Verdict.CANCELLED, reasons=(_NOT_SUBMITTED,))
        return entry


_NOT_SUBMITTED = "not submitted: mbridge was stopped"


def _state(entry: JournalEntry | None) -> str:
    """Return the state of a run that has not ended."""
    if entry is None or entry.last is None:
        return "waits to be submitted"
    status = entry.last.status or SUBMITTED
    job = f"job {entry.last.job_id}: " if entry.last.job_id else ""
    return f"{job}{status.state}{f' ({status.reason})' if status.reason else ''}"


def _awaits_search(run: Mapping[str, Any], entry: JournalEntry | None) -> bool:
    """Return whether a search has not yet chosen a run, and may never choose it."""
    return run.get("search") is not None and (entry is None or not entry.attempts)


def _has_ended(point: PointReport) -> bool:
    return point.verdict is not Verdict.UNFINISHED


def _so_far(points: Sequence[PointReport], held_by: str | None) -> tuple[str, ...]:
    if held_by is None:
        return ()
    ran = [point for point in points if point.verdict is not Verdict.REJECTED]
    ended = sum(map(_has_ended, ran))
    return (f"results so far: {ended} of {counted(len(ran), 'run')} ended; held by {held_by}",)


def _read_journal(root: Path, held_by: str | None) -> _Past:
    path = root / ROOT_FILES.journal
    if held_by and not path.exists():  # its driver has just started
        return _Past({}, {}, was_stopped=False, is_driven=True)
    if not path.exists() and (root / ROOT_FILES.driver_lock).exists():
        raise Damaged(f"{path}: is missing although mbridge has started this run; restore it from a backup")
    if not path.exists():
        raise NothingRan(
            f"{root}: was planned, and nothing was submitted ({ROOT_FILES.journal} is missing);"
            f" start it with: mbridge resume {root}"
        )
    with Journal.read_only(path) as journal:
        past = _Past(journal.entries(), journal.excluded(), journal.was_stopped(), held_by is not None)
    if held_by is None and SubmissionLog(root).proves_loss(past.entries.values()):
        raise Damaged(f"{path}: is empty although jobs were submitted; rebuild it with: mbridge resume {root}")
    return past


def _read_run(
    run: Mapping[str, Any], entry: JournalEntry | None, root: Path
) -> tuple[LogSummary, str, Metrics, RunOutcome]:
    """Return the contents of a run's files: its log, the log's name, the metrics, and the outcome."""
    directory = root / run["key"]
    launcher = launcher_of(run.get("upstream"))
    log_name = launcher.log_name
    last = entry.last if entry else None
    log = read_log(directory / log_name, last.token if last else None, has_records=launcher.has_records)
    batch, length = run["args"].get("gb"), run["args"].get("seq_length")
    tokens = batch * length / _world_size(run) if batch and length else None  # of one step for each rank
    metrics = measure(log.steps, run["warmup_steps"], tokens, definitions_of(run, log.run), run["num_steps"])
    logs = (directory / POINT_FILES.stderr, directory / log_name)
    outcome = judge(
        last.status if last else None,
        log,
        metrics,
        run["num_steps"] or 0,
        [line for path in reversed(logs) for line in last_lines(path, EVIDENCE_LINES)],
        needs_losses=launcher.has_records or any(step.loss is not None for step in log.steps),
    )
    if entry is not None and entry.verdict in (Verdict.SKIPPED, Verdict.UNFINISHED):
        outcome = RunOutcome(Verdict(entry.verdict), entry.reasons, ())
    elif outcome.verdict is not Verdict.SUCCESS and (reasons := _cancelled(entry)):
        outcome = RunOutcome(Verdict.CANCELLED, reasons, ())
    if entry is not None and entry.damage and outcome.verdict is Verdict.FAILED:
        outcome = replace(outcome, reasons=(*outcome.reasons, "a row of the journal is damaged"))
    if outcome.verdict is Verdict.FAILED and last is not None:
        outcome = with_failure(outcome, last.status, log, logs, directory / POINT_FILES.stacks, run["num_steps"])
    if entry is not None and entry.note:
        outcome = replace(outcome, reasons=(*outcome.reasons, entry.note))
    return log, log_name, metrics, outcome


def _cancelled(entry: JournalEntry | None) -> tuple[str, ...]:
    """Return why mbridge cancelled a run, or did not submit it; () otherwise."""
    if entry is None or entry.last is None:
        return entry.reasons if entry is not None and entry.verdict == Verdict.CANCELLED else ()
    status, ending = entry.last.status, entry.last.ending
    if ending is None or ending.job_class is not JobClass.CANCELLED:
        return ()
    if status is None or not status.is_final:
        return (f"{ending.reason}; mbridge did not wait for the end of its job",)
    return (ending.reason,) if status.state == ending.state else ()


_AS_PLANNED = (
    *("key", "test_id", "test_name", "label", "iteration", "coordinates", "args", "num_nodes", "num_steps"),
    "is_pre_test",
)


def _report_run(run: Mapping[str, Any], entry: JournalEntry | None, root: Path, plan: Mapping[str, Any]) -> PointReport:
    log, log_name, metrics, outcome = _read_run(run, entry, root)
    gpus = run.get("whole_nodes_gpus") or _world_size(run)
    job = _job(entry.last, gpus) if entry and entry.last else {}
    return PointReport(
        **{name: run[name] for name in _AS_PLANNED},
        verdict=outcome.verdict,
        reasons=outcome.reasons,
        evidence=outcome.evidence,
        world_size=_world_size(run),
        job=job,
        run=log.run,
        log={"file": f"{run['key']}/{log_name}", "source": log.source, "notes": log.notes},
        metrics=metrics,
        steps=tuple(map(_measured, log.steps)),
        failure=asdict(outcome.failure) if outcome.failure else None,
        attempts=tuple(_job(attempt, gpus) for attempt in (entry.attempts if entry else ())),
        comparability=compare_by(run, log.run, plan["system"], root / run["key"]),
        environment=run_environment(run, job.get("nodes", ""), log.run, plan.get("repository")),
        predicted=_predicted(run.get("predicted"), log.run),
    )


def _measured(step: StepRecord) -> StepRecord:
    """Return a step without rates and times of 0, which a launcher prints for unknown values."""
    return replace(step, step_time_s=step.step_time_s or None, tflops_per_gpu=step.tflops_per_gpu or None)


def _predicted(planned: Mapping[str, Any] | None, said: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the prediction; None if the run reports a device other than the predicted one."""
    if not planned:
        return None
    device = said.get("device")
    if isinstance(device, str) and ((gpu := find_gpu(device)) is None or gpu.name != planned.get("gpu")):
        return None
    return {name: planned.get(name) for name in ("step_time_s", "tflops_per_gpu", "peak_memory_gib")}


def _world_size(run: Mapping[str, Any]) -> int:
    return int(run["num_nodes"] * run["ranks_per_node"])


def _job(attempt: Attempt, gpus: int) -> dict[str, Any]:
    """Return the known facts about an attempt's job. gpus: number of GPUs that it held."""
    status = asdict(attempt.status) if attempt.status else {"state": "SUBMITTING", "reason": "", "nodes": ""}
    names = ("number", "job_id", "submitted_at", "started_at", "ended_at", "failure")
    status.pop("hopeless", None)
    return {name: getattr(attempt, name) for name in names} | status | {"gpus": gpus}


def _report_rejected(point: dict[str, Any]) -> PointReport:
    violations = tuple(point["violations"])
    return PointReport(
        key=f"{point['test_id']}/{point['label']}",
        **{name: point[name] for name in ("test_id", "test_name", "label", "coordinates")},
        iteration=0,
        verdict=Verdict.REJECTED,
        reasons=tuple(violation["message"] for violation in violations),
        violations=violations,
    )
