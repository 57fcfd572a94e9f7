"""Submit ready runs, exactly once, even if the submitting command fails, hangs or is killed."""

import itertools
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure, counted
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.runner.context import (
    Chooser,
    Phase,
    RunnerContext,
    Tracked,
    affordable,
    free_slots,
    past_end_dependency,
    ready,
)
from cloudai_mbridge.runner.finalizer import Finalizer
from cloudai_mbridge.runner.interrupt import Interrupts
from cloudai_mbridge.schedulers.interface import (
    SUBMITTED,
    Job,
    JobClass,
    JobStatus,
    Submission,
    SubmitLater,
    SubmitOutcomeUnknown,
    SubmitRefused,
)

# Pauses of the search for jobs of withdrawn attempts: the longer nothing has turned up, the less often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 300.0
# How often a run is submitted whose submission fails with an unknown error: the answer may have been damaged.
DOUBTFUL_TRIES = 3
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
_NO_LIMIT = 1 << 30


class Submitter:
    """Submits within the limits; first the intent goes into the journal, then the submission, then the job's id."""

    def __init__(
        self, context: RunnerContext, finalizer: Finalizer, keep_open: int | None, choosers: Mapping[str, Chooser]
    ) -> None:
        """keep_open: the lock on submissions, for the commands that submit. choosers: of the tests to search, by id."""
        self._choosers = choosers
        self._searched = {test: [run for run in context.runs if run.plan.test_id == test] for test in choosers}
        self._context, self._finalizer, self._keep_open = context, finalizer, keep_open
        self._parallel_of: dict[str, int] = {}
        self._unsure_since: float | None = None
        self._strays: dict[str, tuple[RunPlan, ...]] = {}
        self._stray_pause_s, self._strays_asked_at = _FIRST_PAUSE_S, float("-inf")
        self._backoff_s, self._submit_after, self._most = 0.0, 0.0, _NO_LIMIT
        self._postponed_since: float | None = None
        self._failing_since: float | None = None

    def submit_ready(self, interrupts: Interrupts) -> None:
        """Submit, in order, the runs that wait for nothing, within the limits; skip those that lack nodes."""
        self.resolve_unsure()
        self._finalizer.continue_stopping()
        active = []
        for run in past_end_dependency(self._context.runs):
            reason = f"{' or '.join(run.plan.end_with)} has ended (end_post_comp)"
            if run.phase is Phase.WAITING:
                self._context.skip([run], reason)
            elif run.phase is Phase.ACTIVE and run.ending is None:
                active.append((run, JobStatus("STOPPED", JobClass.STOPPED, reason=reason)))
        self._finalizer.end(active)
        waiting = ready(self._context.runs, time.monotonic())
        is_closed = self._context.unsure or self._context.stop is not None
        if not waiting or is_closed or time.monotonic() < self._submit_after:
            return
        chosen: list[Tracked] = []
        for run in self._among_searched(waiting):
            if reason := self._finalizer.shortage_for(run):
                self._context.skip([run], reason)
            else:
                chosen.append(run)
        try:
            batches = self._context.scheduler.batches([run.plan for run in chosen])
        except ToolFailure as error:
            self._context.tolerate(error)
            return
        for wanted in (part for batch in batches for part in self._alike(batch)):
            interrupts.check()
            slots = self._free_slots()
            if self._context.stop is not None or (slots is not None and slots <= 0):
                return
            runs = affordable(self._context.runs, self._context.config.max_gpu_hours, wanted)[: self._most]
            if not runs and not self._context.active() and not self._context.unsure:  # nothing ever will be
                reason = f"runner.max_gpu_hours = {self._context.config.max_gpu_hours:g} allows no further run"
                untried = [run for run in wanted if run.plan.search is not None and not run.number]
                self._context.leave_untried(untried, reason)
                self._context.skip([run for run in wanted if run not in untried], reason)
            parallel = slots if slots is not None and slots < len(runs) else None
            if runs and not self._submit(runs, parallel):
                return

    def resubmit_moved(self) -> None:
        """Submit waiting jobs again whose directory no longer exists: the run was moved.

        A job that has begun continues: it writes relative to its starting directory.
        """
        moved = {each.token for each in self._context.log.read() if self._context.log.moved_from(each) is not None}
        waiting = [
            run for run in self._context.runs if run.token in moved and run.phase in (Phase.ACTIVE, Phase.UNSURE)
        ]
        again = [run for run in waiting if self._context.withdraw(run) is None]
        if not again:
            return
        names = counted(len(again), "job")
        self._context.observer.notice(f"{names} would start where the run's directory was: submitting again")
        self._forget(again, "the run was moved", is_doubtful=True)

    def throttle(self) -> None:
        """Let the arrays of an earlier process run as many tasks at a time as the limit allows, in equal shares."""
        if (most := self._context.config.max_parallel) is None:
            return
        by_token: dict[str, list[Tracked]] = {}
        for run in self._context.active():
            by_token.setdefault(run.token, []).append(run)
        arrays = {token: runs for token, runs in by_token.items() if len(runs) > 1}
        for token, runs in arrays.items():
            share = max(1, (most - len(by_token) + len(arrays)) // len(arrays))
            try:
                self._context.scheduler.throttle(self._context.jobs(runs), share)
            except ToolFailure as error:
                self._context.observer.notice(f"{error}; the limit of job array {runs[0].job_id} stays as it was")
            else:
                self._parallel_of[token] = share

    def _free_slots(self) -> int | None:
        return free_slots(self._context.runs, self._context.config.max_parallel, self._parallel_of)

    def may_submit(self) -> bool:
        """Return whether a run waits for nothing, and the limit on active runs allows one more."""
        slots = self._free_slots()
        return (slots is None or slots > 0) and bool(ready(self._context.runs, time.monotonic()))

    def why_end(self, run: RunPlan, step_times: Callable[[], Sequence[float]]) -> str:
        """Return why an active run may end early, else ""."""
        chooser = self._choosers.get(run.test_id)
        return "" if chooser is None else chooser.why_end(run, step_times())

    def _among_searched(self, waiting: Sequence[Tracked]) -> list[Tracked]:
        """Return the runs to submit; leave the untried runs of a finished search out for good.

        Runs that were submitted before, and are to be retried, are always among them.
        """
        chosen: set[str] = set()
        for test, chooser in self._choosers.items():
            if not any(run.plan.test_id == test for run in waiting):
                continue
            keys, over = chooser.choose(self._searched[test], self._context.journal.entry)
            chosen.update(keys)
            if over:
                untried = [run for run in self._searched[test] if run.phase is Phase.WAITING and not run.number]
                self._context.leave_untried(untried, over)
        return [
            run
            for run in waiting
            if run.phase is Phase.WAITING
            and (run.plan.test_id not in self._choosers or run.number or run.plan.key in chosen)
        ]

    def _alike(self, batch: Iterable[RunPlan]) -> list[list[Tracked]]:
        """Return the runs of a batch, those together that avoid the same nodes: a submission excludes them for all."""
        alike: dict[frozenset[str], list[Tracked]] = {}
        for plan in batch:
            run = self._context.by_key[plan.key]
            alike.setdefault(frozenset(run.avoids), []).append(run)
        return list(alike.values())

    def _submit(self, runs: list[Tracked], parallel: int | None) -> bool:
        """Submit runs together; return whether the scheduler takes more."""
        token = secrets.token_hex(8)
        for run in runs:
            if run.token:
                self._context.withdraw(run)  # a job of it may be forgotten, and still start
            if run.number:
                put_aside(self._context.root / run.plan.key, run.number)
            run.number, run.token, run.ending = run.number + 1, token, None
            run.odd_since = run.unknown_since = run.late_since = None
        attempts = [(run.plan.key, run.number) for run in runs]
        self._context.journal.intend(attempts, token)
        self._context.log.submitting(token, attempts)
        if parallel is not None:
            self._parallel_of[token] = parallel
        excluded = self._finalizer.excluded_for(runs) if not runs[0].plan.is_pre_test else ()
        submission = Submission(token, tuple(run.plan for run in runs), excluded, parallel, self._keep_open)
        try:
            ids = self._context.scheduler.submit(submission, self._context.root)
        except SubmitRefused as error:
            self._refused(runs, str(error))
        except SubmitLater as error:
            self._postponed(runs, error)
            return False
        except SubmitOutcomeUnknown as error:
            self._is_unsure(submission, runs)
            self._context.doubts[submission.token] = str(error)
            self._context.observer.notice(f"{error}; looking for the job")
            return False
        except ToolFailure as error:
            self._failing_since = self._failing_since or time.monotonic()
            self._most = max(1, len(runs) // 2)  # it may have been too many at a time
            self._is_unsure(submission, runs)
            self._context.tolerate(error)
            return False
        else:
            self._submitted(ids)
        self._failing_since = None
        self._backoff_s, self._postponed_since, self._most = 0.0, None, max(self._most, 2 * len(runs))
        return True

    def _is_unsure(self, submission: Submission, runs: Iterable[Tracked]) -> None:
        self._context.unsure[submission.token] = submission
        for run in runs:
            run.phase = Phase.UNSURE

    def _submitted(self, ids: dict[str, str]) -> None:
        with self._context.journal.transaction():
            for key, job_id in ids.items():
                number = self._context.by_key[key].number
                self._context.journal.submitted(key, number, job_id)
                self._context.journal.saw(key, number, SUBMITTED)
        for key, job_id in ids.items():
            run = self._context.by_key[key]
            run.phase, run.job_id, run.status, run.submitted_at = Phase.ACTIVE, job_id, SUBMITTED, time.monotonic()
            self._context.has_changed = True
            self._context.observer.saw(run.plan, SUBMITTED)

    def _refused(self, runs: list[Tracked], message: str) -> None:
        reason = f"the scheduler's message: {message}"
        for run in runs:
            self._finalizer.record(run, JobStatus("REFUSED", JobClass.FAILED, reason=reason, run_time_s=0.0))
        self._finalizer.conclude(runs)
        self._finalizer.continue_stopping()

    def _postponed(self, runs: list[Tracked], error: SubmitLater) -> None:
        """Try again later, and with fewer at a time if there is a limit on jobs that our own may have reached."""
        now = time.monotonic()
        if self._postponed_since is None or self._context.active():
            self._postponed_since = now
        self._forget(runs, str(error), is_doubtful=False)
        if now - self._postponed_since > self._context.config.patience_s:
            raise self._context.pause(str(error))
        if not self._backoff_s:
            self._context.observer.notice(f"{error}; submitting again later")
        if error.is_limit:
            self._most = max(1, len(runs) // 2)
        self._backoff_s = min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
        self._submit_after = now + self._backoff_s

    def _forget(self, runs: Collection[Tracked], why: str, *, is_doubtful: bool) -> None:
        """Withdraw attempts for which nothing was submitted, or nothing that may train."""
        with self._context.journal.transaction():
            for run in runs:
                self._context.journal.forget(run.plan.key, run.number, why)
        self._log_withdrawn(runs, is_doubtful=is_doubtful)
        for run in runs:
            run.phase, run.number, run.token = Phase.WAITING, run.number - 1, ""

    def _log_withdrawn(self, runs: Iterable[Tracked], *, is_doubtful: bool) -> None:
        by_token: dict[str, list[RunPlan]] = {}
        for run in runs:
            by_token.setdefault(run.token, []).append(run.plan)
        for token, plans in by_token.items():
            self._context.log.withdrawn(token, [plan.key for plan in plans], is_doubtful=is_doubtful)
            if is_doubtful:
                self.look_for_strays(token, plans)

    def look_for_strays(self, token: str, runs: Iterable[RunPlan]) -> None:
        """From now on cancel the jobs of a withdrawn attempt; none of them trains, since the runner holds its claim."""
        self._strays[token] = (*self._strays.get(token, ()), *runs)
        self._stray_pause_s = _FIRST_PAUSE_S

    def cancel_strays(self, *, at_once: bool = False) -> None:
        """Cancel jobs of withdrawn attempts that have turned up, if the last query was long ago, or at once."""
        now = time.monotonic()
        if not self._strays or (now - self._strays_asked_at < self._stray_pause_s and not at_once):
            return
        self._strays_asked_at, self._stray_pause_s = now, min(2 * self._stray_pause_s, _LONGEST_PAUSE_S)
        left = [Submission(token, runs) for token, runs in self._strays.items()]
        try:
            while left:  # as few queries as there are withdrawn attempts of one run
                chosen: list[Submission] = []
                keys: set[str] = set()
                for submission in left:
                    if keys.isdisjoint(own := {run.key for run in submission.runs}):
                        keys |= own
                        chosen.append(submission)
                left = [submission for submission in left if submission not in chosen]
                self._cancel_strays_of(chosen)
        except ToolFailure as error:
            self._stray_pause_s = _FIRST_PAUSE_S
            self._context.tolerate(error)

    def _cancel_strays_of(self, submissions: list[Submission]) -> None:
        root = self._context.root
        found = self._context.scheduler.find(submissions, root)
        late = [
            Job(run.key, found[run.key], submission.token, root / run.key, run.array_index)
            for submission in submissions
            for run in submission.runs
            if run.key in found
        ]
        if not late:
            return
        text = f"cancelling {', '.join(sorted(found.values()))}: submitted after it had been given up"
        self._context.observer.notice(text)
        self._context.journal.note(text)
        self._context.scheduler.cancel(late)
        for job in late:
            self._strays[job.token] = tuple(run for run in self._strays[job.token] if run.key != job.key)
            if not self._strays[job.token]:
                del self._strays[job.token]

    def resolve_unsure(self) -> None:
        """Determine whether submissions without an answer were made."""
        self.cancel_strays()
        if not self._context.unsure:
            return
        try:
            found = self._context.scheduler.find(self._context.unsure.values(), self._context.root)
        except ToolFailure as error:
            self._context.tolerate(error)
            return
        self._context.answered()
        self._unsure_since = self._unsure_since or time.monotonic()
        self._submitted({key: id_ for key, id_ in found.items() if self._context.by_key[key].phase is Phase.UNSURE})
        is_settled = time.monotonic() - self._unsure_since > self._context.config.settle_s
        for token, submission in list(self._context.unsure.items()):
            missing = [run for plan in submission.runs if (run := self._context.by_key[plan.key]).phase is Phase.UNSURE]
            if missing and not is_settled:
                continue
            self._give_up(token, missing)
        if not self._context.unsure:
            self._unsure_since, failing_since = None, self._failing_since
            if failing_since is not None and time.monotonic() - failing_since > self._context.config.patience_s:
                raise self._context.pause("no submission has succeeded")

    def _give_up(self, token: str, missing: Iterable[Tracked]) -> None:
        """Claim the attempts whose jobs were not found; submit them again, or refuse them as the scheduler did."""
        left = []
        for run in missing:
            if (holder := self._context.withdraw(run)) is None:
                left.append(run)
            else:
                self._submitted({run.plan.key: holder})
        del self._context.unsure[token]
        message = self._context.doubts.pop(token, None)
        for run in left:
            run.num_doubtful += message is not None
        if refused := [run for run in left if run.num_doubtful >= DOUBTFUL_TRIES]:
            self._log_withdrawn(refused, is_doubtful=True)
            self._refused(refused, message or "")
        if again := [run for run in left if run.num_doubtful < DOUBTFUL_TRIES]:
            self._forget(again, "the scheduler does not know it", is_doubtful=True)


_LEFT_BEHIND = (
    *(POINT_FILES.stdout, POINT_FILES.stderr, POINT_FILES.started, POINT_FILES.exit_code, POINT_FILES.stacks),
    *(POINT_FILES.launcher_log, POINT_FILES.slurm_job_id, POINT_FILES.nemorun_home, POINT_FILES.report),
)


def put_aside(directory: Path, number: int) -> None:
    """Move the files of attempt `number` into a directory of its own. Safe to repeat after a crash in its middle.

    A file is renamed to the first of path, path.1, path.2, ... that is free: an unwanted job may have written too.
    """
    kept = directory / POINT_FILES.attempt.format(number)
    for name in _LEFT_BEHIND:
        if (source := directory / name).exists():
            kept.mkdir(exist_ok=True)
            names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(1)))
            source.rename(next(kept / free for free in names if not (kept / free).exists()))
