"""Build a report from the files in a run's directory: plan, journal, logs. The run itself need not be alive."""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from cloudai_mbridge.errors import Damaged, NothingRan, counted
from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.files.text import readable
from cloudai_mbridge.logs import PROFILED, SKIPPED, LogSummary, read_log
from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.metrics import Metrics, first_step, measure
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.models.test_definition import last_warmup_step
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan
from cloudai_mbridge.plan.launchers import launcher_of
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.rehearsal.record import read_rehearsal
from cloudai_mbridge.report.facts import compare_by, definitions_of, machine_environment, run_environment
from cloudai_mbridge.report.model import (
    OUT_OF_MEMORY,
    PointReport,
    RehearsalReport,
    RunReport,
    SearchReport,
    TrialOutcome,
    TrialReport,
)
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.report.text import ranges
from cloudai_mbridge.runner import Judge
from cloudai_mbridge.runner.journal import Attempt, Journal, JournalEntry, SubmissionLog
from cloudai_mbridge.runner.journal_file import UNTRIED
from cloudai_mbridge.runner.observe import Observed
from cloudai_mbridge.schedulers.interface import ENDED_EARLY, PENDING, SUBMITTED, JobClass
from cloudai_mbridge.training.credentials.scrub import redacted_in
from cloudai_mbridge.verdict import Judgement, RunOutcome, Verdict, judge, judgement_of, with_failure
from cloudai_mbridge.version import __version__

LAST_LINES = 15


def build_report(root: Path, observed: Observed = Observed()) -> RunReport:  # noqa: B008 - it is frozen
    """Read a run's directory. Everything that looks like a credential is redacted, except in names of points.

    A run without a verdict, and without evidence of its end, is unfinished: the report contains the results so far, as
    its first note states.
    observed: who drives it, and where its jobs stand; default: nobody, and as the journal has them.

    BadInput: not a run's directory, or an unreadable one; nothing was submitted.
    """
    plan = read_plan_data(root)
    refuse_dry_run(root, plan)
    entries, excluded, was_stopped = _read_journal(root, observed.held_by)
    entries = observed.applied_to(entries)
    if (lacking := _lacking(plan)) is not None:
        raise Damaged(f"{root / ROOT_FILES.plan}: is damaged (it lacks {lacking}); restore the file")
    damage = [f"{ROOT_FILES.journal}: {entry.key}: {text}" for entry in entries.values() for text in entry.damage]
    runs = _runs_to_report(plan["runs"], entries, was_stopped=was_stopped, is_driven=observed.held_by is not None)
    points = [_report_run(run, entry, root, plan) for run, entry in runs]
    points += map(_report_rejected, plan["rejected"])
    points = [_without_credentials(point) for point in points]
    ended = [point for point in points if point.verdict is not Verdict.UNFINISHED]
    searches = tuple(_read_searches(plan["runs"], entries, ended))
    so_far = []
    if observed.held_by is not None or len(ended) < len(points):
        num_ran = sum(point.verdict is not Verdict.REJECTED for point in points)
        num_ended = num_ran - (len(points) - len(ended))
        so_far = [f"results so far: {num_ended} of {counted(num_ran, 'run')} ended; {observed.driver_text}"]
        so_far[0] += "" if observed.held_by else f"; continue with: mbridge resume {root}"
    rehearsed, no_rehearsal = _read_rehearsal(root)
    return RunReport(
        tool_version=__version__,
        scenario=plan["scenario"],
        system=plan["system"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        points=tuple(points),
        num_rejected=plan["num_rejected"],
        rule_counts=plan["rule_counts"],
        notes=redacted_in((*so_far, *plan["notes"], *map(_in_words, searches), *no_rehearsal, *damage)),
        excluded_nodes=redacted_in(excluded),
        tests=tuple(plan["tests"]),
        environment=machine_environment(),
        searches=searches,
        left_out=tuple(
            LeftOut(point["test_id"], point["label"], redacted_in(point["reason"]))
            for point in plan.get("left_out", ())
        ),
        rehearsed=rehearsed,
    )


def _read_rehearsal(root: Path) -> tuple[tuple[RehearsalReport, ...], tuple[str, ...]]:
    """Return what a rehearsal found before the run, and a note if its file cannot be read."""
    try:
        rehearsal = read_rehearsal(root)
    except Damaged as error:
        return (), (str(error),)
    found = (
        RehearsalReport(
            *(point.test_id, point.label, point.verdict, redacted_in(point.reason), point.stack, point.is_job_stack),
            *(len(point.ranks), len(point.built), point.states),
        )
        for point in (rehearsal.points if rehearsal else ())
    )
    return tuple(found), ()


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


def _runs_to_report(
    planned: Iterable[dict[str, Any]], entries: Mapping[str, JournalEntry], *, was_stopped: bool, is_driven: bool
) -> Iterator[tuple[dict[str, Any], JournalEntry | None]]:
    """Yield runs with their entries, which have a verdict if the run has not ended, or was cancelled without a job.

    Without a verdict in the journal, a run has ended if its last job has: nobody need have judged it yet. A job that
    mbridge was cancelling when it was stopped counts as cancelled.
    was_stopped: runs without a job were not to be submitted any more. is_driven: a process drives the run.
    """
    for run in planned:
        entry = entries.get(run["key"])
        if entry is not None and entry.verdict == UNTRIED:  # a search did not need it
            continue
        if entry is not None and entry.verdict is not None:
            yield run, entry
            continue
        entry = entry or JournalEntry(run["key"], None, (), ())
        if was_stopped and not is_driven and not entry.attempts:
            entry = replace(entry, verdict=Verdict.CANCELLED, reasons=("not submitted: mbridge was stopped",))
        elif run.get("search") is not None and not entry.attempts:  # it may never be chosen
            continue
        elif is_driven or not _has_ended(entry):
            entry = replace(entry, verdict=Verdict.UNFINISHED, reasons=(_state(entry),))
        yield run, entry


def _has_ended(entry: JournalEntry) -> bool:
    """Return whether the last job of a run without a verdict has ended, and no other is to follow."""
    last = entry.last
    if last is None or last.failure:  # to be tried again
        return False
    is_cancelled = last.ending is not None and last.ending.job_class is JobClass.CANCELLED
    return last.ended_at is not None or is_cancelled or (last.status is not None and last.status.is_final)


def _state(entry: JournalEntry) -> str:
    """Return the state of a run that has not ended."""
    if entry.last is None:
        return "waits to be submitted"
    if entry.last.failure:
        return f"attempt {entry.last.number} failed: {entry.last.failure}; waits to be tried again"
    status = entry.last.status or SUBMITTED
    job = f"job {entry.last.job_id}: " if entry.last.job_id else ""
    return f"{job}{status.state}{f' ({status.reason})' if status.reason else ''}"


def _read_journal(root: Path, held_by: str | None) -> tuple[Mapping[str, JournalEntry], Mapping[str, str], bool]:
    """Return the journal's entries, the excluded nodes, and whether the run was stopped."""
    path = root / ROOT_FILES.journal
    if held_by and not path.exists():  # its driver has just started
        return {}, {}, False
    if not path.exists() and (root / ROOT_FILES.driver_lock).exists():
        raise Damaged(f"{path}: is missing although mbridge has started this run; restore it from a backup")
    if not path.exists():
        raise NothingRan(
            f"{root}: was planned, and nothing was submitted ({ROOT_FILES.journal} is missing);"
            f" start it with: mbridge resume {root}"
        )
    with Journal.read_only(path) as journal:
        entries, excluded, was_stopped = journal.entries(), journal.excluded(), journal.was_stopped()
    if held_by is None and SubmissionLog(root).proves_loss(entries.values()):
        raise Damaged(f"{path}: is empty although jobs were submitted; rebuild it with: mbridge resume {root}")
    return entries, excluded, was_stopped


def _read_run(
    run: Mapping[str, Any], entry: JournalEntry | None, root: Path
) -> tuple[LogSummary, str, Metrics, RunOutcome]:
    """Return the contents of a run's files: its log, the log's name, the metrics, and the outcome."""
    directory = root / run["key"]
    launcher = launcher_of(run.get("upstream"))
    log_name = launcher.log_name
    last = entry.last if entry else None
    log = read_log(directory / log_name, last.token if last else None, has_records=launcher.has_records)
    log = _without_profiled(log, run.get("profiled"))
    batch, length = run["args"].get("gb"), run["args"].get("seq_length")
    tokens = batch * length / _world_size(run) if batch and length else None  # of one step for each rank
    first = first_step(log.run, log.steps)
    warmup = last_warmup_step(first, run["warmup_steps"], run["num_steps"], run.get("definition") or {})
    metrics = measure(log.steps, warmup, tokens, run["num_steps"], **definitions_of(run, log.run))
    logs = (directory / POINT_FILES.stderr, directory / log_name)
    outcome = judge(
        last.status if last else None,
        log,
        metrics,
        run["num_steps"] or 0,
        [line for path in reversed(logs) for line in last_lines(path, LAST_LINES)],
        needs_losses=launcher.has_records or any(step.loss is not None for step in log.steps),
    )
    if entry is not None and entry.verdict in (Verdict.SKIPPED, Verdict.UNFINISHED):
        outcome = RunOutcome(Verdict(entry.verdict), entry.reasons)
    elif outcome.verdict is not Verdict.SUCCESS and (reasons := _cancelled(entry)):
        outcome = RunOutcome(Verdict.CANCELLED, reasons)
    if entry is not None and entry.damage and outcome.verdict is Verdict.FAILED:
        outcome = replace(outcome, reasons=(*outcome.reasons, "a row of the journal is damaged"))
    if outcome.verdict is Verdict.FAILED and last is not None:
        stacks, has_records = directory / POINT_FILES.stacks, launcher.has_records
        outcome = with_failure(outcome, last.status, log, logs, stacks, run["num_steps"], has_records=has_records)
    if entry is not None and entry.note:
        outcome = replace(outcome, reasons=(*outcome.reasons, entry.note))
    return log, log_name, metrics, outcome


def _without_profiled(log: LogSummary, window: Sequence[int] | None) -> LogSummary:
    """Return a log whose steps are marked that a profiler slowed. window: the first and the last of them."""
    if not window:
        return log
    first, last = window
    steps = (
        replace(step, left_out=step.left_out or PROFILED) if first <= step.step <= last else step for step in log.steps
    )
    return replace(log, steps=tuple(steps))


_TRACES = ("torch_profile/*.json*", "*.nsys-rep", "*.qdrep")
_MOST_TRACES = 3


def _notes_on_steps(log: LogSummary, directory: Path) -> Iterator[str]:
    """Yield the steps that are no measurements, and the traces of the profiled ones."""
    if skipped := [step.step for step in log.steps if step.left_out == SKIPPED]:
        yield f"the optimizer skipped {counted(len(skipped), 'step')}, which are no measurements: {ranges(skipped)}"
    profiled = [step.step for step in log.steps if step.left_out == PROFILED]
    traces = sorted(path.relative_to(directory) for pattern in _TRACES for path in directory.glob(pattern))
    if profiled or traces:
        names = ", ".join(map(str, traces[:_MOST_TRACES]))
        more = f" and {len(traces) - _MOST_TRACES} more" if len(traces) > _MOST_TRACES else ""
        where = f"traces: {names}{more}" if traces else "no trace is in the run's directory"
        yield f"profiled: {f'steps {ranges(profiled)}, which are no measurements; ' if profiled else ''}{where}"


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
    if _is_to_retry(entry, outcome, metrics, plan):
        reasons = (*outcome.reasons, "to be tried again by: mbridge resume")
        outcome = replace(outcome, verdict=Verdict.UNFINISHED, reasons=reasons)
    gpus = run.get("whole_nodes_gpus") or _world_size(run)
    job = _job(entry.last, gpus) if entry and entry.last else {}
    return PointReport(
        **{name: run[name] for name in _AS_PLANNED},
        verdict=outcome.verdict,
        reasons=outcome.reasons,
        evidence=outcome.evidence,
        last_lines=outcome.last_lines,
        world_size=_world_size(run),
        job=job,
        run=log.run,
        log={
            "file": f"{run['key']}/{log_name}",
            "source": log.source,
            "notes": (*log.notes, *_notes_on_steps(log, root / run["key"])),
        },
        metrics=metrics,
        # a launcher prints rates and times of 0 for unknown values
        steps=tuple(
            replace(step, step_time_s=step.step_time_s or None, tflops_per_gpu=step.tflops_per_gpu or None)
            for step in log.steps
        ),
        failure=asdict(outcome.failure) if outcome.failure else None,
        attempts=tuple(_job(attempt, gpus) for attempt in (entry.attempts if entry else ())),
        comparability=compare_by(run, log.run, plan["system"], root / run["key"]),
        environment=run_environment(run, job.get("nodes", ""), log.run, plan.get("repository")),
        predicted=_predicted(run.get("predicted"), log.run),
    )


def _is_to_retry(entry: JournalEntry | None, outcome: RunOutcome, metrics: Metrics, plan: Mapping[str, Any]) -> bool:
    """Return whether a failure that no mbridge has seen yet is one that it retries."""
    last = entry.last if entry is not None and entry.verdict is None else None
    if entry is None or last is None or last.ended_at is not None or outcome.verdict is not Verdict.FAILED:
        return False
    num_retries = sum(bool(attempt.failure) for attempt in entry.attempts)
    is_left = num_retries < RunnerConfig.model_validate(plan.get("runner") or {}).retries
    return is_left and judgement_of(outcome, last.status, metrics).is_infrastructure


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
    status: dict[str, Any] = {"state": "SUBMITTING", "reason": "", "nodes": ""}
    if attempt.status is not None:
        status = asdict(attempt.status)
    if attempt.status is not None and not attempt.status.is_final:  # its time was noted when its state last changed
        status["run_time_s"] = None if attempt.status.state == PENDING else _since_start_s(attempt)
    names = ("number", "job_id", "submitted_at", "started_at", "ended_at", "failure")
    status.pop("hopeless", None)
    return {name: getattr(attempt, name) for name in names} | status | {"gpus": gpus}


def _since_start_s(attempt: Attempt) -> float | None:
    if attempt.started_at is None:
        return None
    return max(0.0, time.time() - datetime.fromisoformat(attempt.started_at).timestamp())


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


def _read_searches(
    planned: Sequence[Mapping[str, Any]], entries: Mapping[str, JournalEntry], points: Iterable[PointReport]
) -> Iterator[SearchReport]:
    """Yield a report of every test that was searched. planned: the plan's runs."""
    by_test: dict[str, dict[str, list[PointReport]]] = {}
    searched = {run["key"]: run for run in planned if run.get("search") is not None}
    again = {key for key, run in searched.items() if run["search"].get("is_again")}
    for point in points:
        if point.key in searched:
            by_test.setdefault(point.test_id, {}).setdefault(point.label, []).append(point)
    for test in dict.fromkeys(run["test_id"] for run in searched.values()):
        own = [run for run in searched.values() if run["test_id"] == test]
        submitted = [
            (min(str(each.get("submitted_at") or "") for run in runs for each in run.attempts), runs)
            for runs in by_test.get(test, {}).values()
            if any(run.attempts for run in runs)
        ]
        tried = [runs for _, runs in sorted(submitted, key=lambda pair: pair[0])]
        trials = tuple(_trial(runs, again) for runs in tried)
        done = [trial for trial in trials if trial.outcome == "measured"]
        done.sort(key=lambda trial: trial.step_time_s or math.inf)
        keys = {runs[0].label: runs[0].key for runs in tried}
        found = (entries.get(run["key"]) for run in own)
        untried = [entry for entry in found if entry is not None and entry.verdict == UNTRIED]
        yield SearchReport(
            test_id=test,
            points=len({run["label"] for run in own}),
            trials=trials,
            best=done[0].label if done else None,
            best_definition=f"{keys[done[0].label]}/{POINT_FILES.definition}" if done else None,
            step_time_s=done[0].step_time_s if done else None,
            runner_up=done[1].label if len(done) > 1 else None,
            runner_up_s=done[1].step_time_s if len(done) > 1 else None,
            gpu_hours=sum(trial.gpu_hours for trial in trials),
            ending="; ".join(dict.fromkeys(reason for entry in untried for reason in entry.reasons)),
        )


def _trial(runs: Sequence[PointReport], again: Collection[str]) -> TrialReport:
    """Report a point. again: the keys of runs whose failure does not invalidate earlier measurements."""
    ran = [run for run in runs if run.attempts]
    failed = [run for run in ran if run.verdict is not Verdict.SUCCESS and run.key not in again]
    outcome: TrialOutcome = "failed" if failed else "measured"
    if any(run.job.get("state") == ENDED_EARLY for run in ran):
        outcome = "ended early"
    elif any((run.failure or {}).get("id") == OUT_OF_MEMORY for run in failed):
        outcome = "out of memory"
    good = [run for run in ran if run.verdict is Verdict.SUCCESS or run.job.get("state") == ENDED_EARLY]
    times = [run.metrics.step_time_s.capped_mean for run in good if run.metrics and run.metrics.step_time_s]
    is_known = outcome in ("measured", "ended early")
    predicted = ran[0].predicted or {}
    return TrialReport(
        label=ran[0].label,
        outcome=outcome,
        runs=len(ran),
        step_time_s=fmean(times) if times and is_known else None,
        predicted_step_time_s=predicted.get("step_time_s"),
        gpu_hours=gpu_hours(runs),
    )


def _in_words(search: SearchReport) -> str:
    """Summarize a search in one line."""
    text = f"test {search.test_id!r}: searched: {len(search.trials)} of {search.points} points tried"
    counts = Counter(trial.outcome for trial in search.trials if trial.outcome != "measured")
    text += f" ({', '.join(f'{count} {outcome}' for outcome, count in counts.items())})" if counts else ""
    text += f", {readable(search.gpu_hours, 3)} GPU-hours"
    if search.best is not None:
        text += f"; best: {search.best}, {search.step_time_s:.4g} s ({search.best_definition})"
    if search.runner_up_s and search.step_time_s:
        text += f"; then {search.runner_up}, {search.runner_up_s / search.step_time_s - 1:+.1%}"
    return f"{text}; {search.ending}" if search.ending else text
