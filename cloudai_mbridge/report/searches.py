"""Reports of a run's searches: the trials in order, the best point, the cost."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import OUT_OF_MEMORY, PointReport, SearchReport, TrialOutcome, TrialReport
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.runner.journal_file import UNTRIED
from cloudai_mbridge.schedulers.interface import ENDED_EARLY
from cloudai_mbridge.verdict import Verdict


def is_untried(entry: JournalEntry | None) -> bool:
    """Return whether a search did not need a run, which is then left out of the report."""
    return entry is not None and entry.verdict == UNTRIED


def read_searches(
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
        tried = sorted(filter(_was_submitted, by_test.get(test, {}).values()), key=_first_submitted)
        trials = tuple(_trial(runs, again) for runs in tried)
        done = [trial for trial in trials if trial.outcome is TrialOutcome.MEASURED]
        done.sort(key=lambda trial: trial.step_time_s or math.inf)
        keys = {runs[0].label: runs[0].key for runs in tried}
        untried = [entries[run["key"]] for run in own if is_untried(entries.get(run["key"]))]
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


def _was_submitted(runs: Sequence[PointReport]) -> bool:
    return any(run.attempts for run in runs)


def _first_submitted(runs: Sequence[PointReport]) -> str:
    return min(str(attempt.get("submitted_at") or "") for run in runs for attempt in run.attempts)


def _trial(runs: Sequence[PointReport], again: Collection[str]) -> TrialReport:
    """Report a point. again: the keys of runs whose failure does not invalidate earlier measurements."""
    ran = [run for run in runs if run.attempts]
    failed = [run for run in ran if run.verdict is not Verdict.SUCCESS and run.key not in again]
    if any(run.job.get("state") == ENDED_EARLY for run in ran):
        outcome = TrialOutcome.ENDED_EARLY
    elif any((run.failure or {}).get("id") == OUT_OF_MEMORY for run in failed):
        outcome = TrialOutcome.OUT_OF_MEMORY
    else:
        outcome = TrialOutcome.FAILED if failed else TrialOutcome.MEASURED
    good = [run for run in ran if run.verdict is Verdict.SUCCESS or run.job.get("state") == ENDED_EARLY]
    times = [run.metrics.step_time_s.capped_mean for run in good if run.metrics and run.metrics.step_time_s]
    is_known = outcome in (TrialOutcome.MEASURED, TrialOutcome.ENDED_EARLY)
    predicted = ran[0].predicted or {}
    return TrialReport(
        label=ran[0].label,
        outcome=outcome,
        runs=len(ran),
        step_time_s=fmean(times) if times and is_known else None,
        predicted_step_time_s=predicted.get("step_time_s"),
        gpu_hours=gpu_hours(runs),
    )


def in_words(search: SearchReport) -> str:
    """Summarize a search in one line."""
    text = f"test {search.test_id!r}: searched: {len(search.trials)} of {search.points} points tried"
    counts = Counter(str(trial.outcome) for trial in search.trials if trial.outcome is not TrialOutcome.MEASURED)
    text += f" ({', '.join(f'{count} {outcome}' for outcome, count in counts.items())})" if counts else ""
    text += f", {search.gpu_hours:.3g} GPU-hours"
    if search.best is not None:
        text += f"; best: {search.best}, {search.step_time_s:.4g} s ({search.best_definition})"
    if search.runner_up_s and search.step_time_s:
        text += f"; then {search.runner_up}, {search.runner_up_s / search.step_time_s - 1:+.1%}"
    return f"{text}; {search.ending}" if search.ending else text
