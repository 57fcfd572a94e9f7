"""Continue the work of an earlier process: from the journal, the log of submissions, and the jobs' files."""

import time
from collections.abc import Collection
from pathlib import Path

from cloudai_mbridge.errors import Damaged
from cloudai_mbridge.launch.claim import claimed_by, claiming_tokens
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.runner.context import Phase, RunnerContext, Tracked
from cloudai_mbridge.runner.finalizer import INTERRUPTED, Finalizer
from cloudai_mbridge.runner.journal import Journal, JournalEntry, SubmissionLog
from cloudai_mbridge.runner.submitter import Submitter
from cloudai_mbridge.schedulers.interface import Submission
from cloudai_mbridge.verdict import Verdict

_REMEDY = f"restore {ROOT_FILES.journal}, or start a new run"


def require_known(root: Path, entries: Collection[JournalEntry], log: SubmissionLog) -> None:
    """Check that the journal and the log of submissions together contain all jobs.

    Damaged: a job has started that neither contains; or both are incomplete.
    """
    logged = log.read()
    has_journal = any(entry.attempts for entry in entries)
    if not has_journal and (line := log.damaged_line()) is not None:
        path = root / ROOT_FILES.submissions
        raise Damaged(f"{path}:{line}: is damaged, and {ROOT_FILES.journal} knows of no job; {_REMEDY}")
    known = {(entry.key, attempt.token) for entry in entries for attempt in entry.attempts}
    known |= {(attempt.key, attempt.token) for attempt in logged}
    for key in (entry.key for entry in entries):
        has_started = not known and (root / key / POINT_FILES.started).exists()
        if has_started or any((key, token) not in known for token in claiming_tokens(root / key)):
            raise Damaged(f"{root}: a job of {key} has started, and {ROOT_FILES.journal} does not know it; {_REMEDY}")


def restore_tokens(journal: Journal, log: SubmissionLog) -> None:
    """Replace unsubmitted tokens in the journal by the attempts' tokens in the log of submissions.

    Under a wrong token its job would not be found, and the run would be submitted a second time.
    """
    submitted = log.read()
    known = {(attempt.key, attempt.token) for attempt in submitted}
    right = {(attempt.key, attempt.number): attempt.token for attempt in submitted if not attempt.is_withdrawn}
    for key, number, token in journal.tokens():
        if (key, token) not in known and (key, number) in right:
            journal.retoken(key, number, right[key, number])


def restore_runs(context: RunnerContext, submitter: Submitter, finalizer: Finalizer) -> None:
    """Set every run to its state in the journal."""
    _recover_submissions(context, submitter)
    unsure: dict[str, list[Tracked]] = {}
    entries = context.journal.entries()
    for run in context.runs:
        entry = entries[run.plan.key]
        for attempt in entry.attempts:
            if attempt.ended_at is not None and attempt.status is not None and attempt.job_id is not None:
                run.end_attempt(attempt.status)
        run.num_retries = sum(bool(attempt.failure) for attempt in entry.attempts)
        if (last := entry.last) is None:
            run.phase = Phase.WAITING if entry.verdict is None else Phase.ENDED
            continue
        run.number, run.token, run.job_id = last.number, last.token, last.job_id or ""
        run.status, run.ending, run.submitted_at = last.status, last.ending, time.monotonic()
        if last.ended_at is None and last.job_id is None:
            run.phase = Phase.UNSURE
            unsure.setdefault(run.token, []).append(run)
        elif last.ended_at is None:
            run.phase = Phase.ACTIVE
        elif run.status is not None and run.status.state == INTERRUPTED.state:
            context.journal.reopen(run.plan.key)
        elif entry.verdict is not None or not last.failure:
            run.phase = Phase.ENDED
    for token, runs in unsure.items():
        context.unsure[token] = Submission(token, tuple(run.plan for run in runs))
    # Actions on ended runs, in case the earlier process had no time for them
    for run in [run for run in context.runs if run.phase is Phase.ENDED]:
        entry = entries[run.plan.key]
        if entry.verdict is None:
            finalizer.conclude([run])
        elif entry.verdict == Verdict.FAILED and (run.status is None or run.status.state != INTERRUPTED.state):
            finalizer.follow_failure(run, entry.reasons)
    finalizer.continue_stopping()


def _recover_submissions(context: RunnerContext, submitter: Submitter) -> None:
    """Add submissions that are in the log and not in the journal, as unanswered."""
    entries = context.journal.entries()
    last = {key: entry.last.number if entry.last else 0 for key, entry in entries.items()}
    found, withdrawn = 0, set()
    for attempt in context.log.read():
        run = context.by_key.get(attempt.key)
        if run is None:
            continue
        if attempt.is_withdrawn:
            withdrawn.add((attempt.key, attempt.token))
            if attempt.is_doubtful:
                submitter.look_for_strays(attempt.token, [run.plan])
        elif attempt.number > last[attempt.key] and not entries[attempt.key].damage:
            with context.journal.transaction():
                context.journal.intend([(attempt.key, attempt.number)], attempt.token)
                if job_id := claimed_by(context.root / attempt.key, attempt.token):
                    context.journal.submitted(attempt.key, attempt.number, job_id)
            last[attempt.key] = attempt.number
            found += 1
    # Only a journal that was lost, and rebuilt from the log, has superseded attempts without a job: one that has never
    # started may still wait
    for key, entry in context.journal.entries().items():
        for superseded in entry.attempts[:-1]:
            is_known = superseded.job_id is not None or superseded.ended_at is not None
            is_known |= (key, superseded.token) in withdrawn or key not in context.by_key
            if not is_known and claimed_by(context.root / key, superseded.token) is None:
                context.log.withdrawn(superseded.token, [key], is_doubtful=True)
                submitter.look_for_strays(superseded.token, [context.by_key[key].plan])
    if found:
        where = f"in {ROOT_FILES.submissions} and not in the journal"
        context.observer.notice(f"{found} submissions are {where}; looking for them")
