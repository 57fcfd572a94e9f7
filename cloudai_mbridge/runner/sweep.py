"""The runs of a plan under way: take up what is there, submit, look, and end what must not go on."""

import time
from collections.abc import Iterable
from dataclasses import replace

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.runner.context import RunnerContext
from cloudai_mbridge.runner.finalizer import INTERRUPTED, Finalizer
from cloudai_mbridge.runner.interrupt import Interrupts
from cloudai_mbridge.runner.journal.journal import JournalEntry
from cloudai_mbridge.runner.nodes import Nodes
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.runner.submitter import Submitter
from cloudai_mbridge.runner.tracked import FAILED, Judge, Phase, Tracked
from cloudai_mbridge.schedulers.interface import FORGOTTEN, NEVER_STARTED, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.slurm.states import PARTITION_NODE_LIMIT

# A pending job that can never start is looked at twice before it is given up: an administrator may be at work.
HOPELESS_S = 10.0
_ASK_FOR_LOST_S = 1.0


class Sweep:
    """Every change is in the journal before anything else follows from it, so that any process can go on from there."""

    def __init__(self, context: RunnerContext, judge: Judge, keep_open: int | None = None) -> None:
        """keep_open: the lock on submissions, for the commands that submit."""
        self._context = context
        nodes = Nodes(context)
        self._finalizer = Finalizer(context, nodes, judge)
        self._submitter = Submitter(context, nodes, self._finalizer, keep_open)
        self._progress = Progress(context.root)
        self.poll_s = 0.0
        self._ask_for_lost_after = 0.0
        self._stopping_since: float | None = None

    # ---- take up what an earlier process left

    def restore(self) -> None:
        """Take every run up where the journal says that it stands."""
        self._submitter.recover()
        unsure: dict[str, list[Tracked]] = {}
        entries = self._context.journal.entries()
        for run in self._context.runs:
            self._restore(run, entries[run.plan.key])
            if run.phase is Phase.UNSURE:
                unsure.setdefault(run.token, []).append(run)
        for token, runs in unsure.items():
            self._context.unsure[token] = Submission(token, tuple(run.plan for run in runs))
        for run in [run for run in self._context.runs if run.phase is Phase.ENDED]:
            self._follow(run, entries[run.plan.key])
        self._finalizer.continue_stopping()
        self.look()

    def _follow(self, run: Tracked, entry: JournalEntry) -> None:
        """Do what an ended run asks for, in case the earlier process had no time for it."""
        if entry.verdict is None:
            self._finalizer.conclude([run])
        elif entry.verdict == FAILED and (run.status is None or run.status.state != INTERRUPTED.state):
            self._finalizer.follow_failure(run, entry.reasons)

    def _restore(self, run: Tracked, entry: JournalEntry) -> None:
        for attempt in entry.attempts:
            if attempt.ended_at is not None and attempt.status is not None and attempt.job_id is not None:
                run.end_attempt(attempt.status)
        run.num_retries = sum(bool(attempt.failure) for attempt in entry.attempts)
        if (last := entry.last) is None:
            run.phase = Phase.WAITING if entry.verdict is None else Phase.ENDED
            return
        run.number, run.token, run.job_id = last.number, last.token, last.job_id or ""
        run.status, run.ending, run.submitted_at = last.status, last.ending, time.monotonic()
        if last.ended_at is None:
            run.phase = Phase.UNSURE if last.job_id is None else Phase.ACTIVE
        elif run.status is not None and run.status.state == INTERRUPTED.state:
            self._context.journal.reopen(run.plan.key)
        elif entry.verdict is not None or not last.failure:
            run.phase = Phase.ENDED

    # ---- go on

    def submit_ready(self, interrupts: Interrupts) -> None:
        """Submit what can be submitted."""
        self._submitter.submit_ready(interrupts)

    def look(self) -> None:
        """Ask for all active jobs at once, and end what must not go on."""
        active = {run.plan.key: run for run in self._context.active()}
        if not active:
            return
        try:
            seen = self._poll(active.values())
        except ToolFailure as error:
            self._context.tolerate(error)
            return
        self._context.answered()
        with self._context.journal.transaction():
            for key, job in seen.items():
                if job.job_id != active[key].job_id:
                    self._context.adopt(active[key], job.job_id)
                self._saw(active[key], job.status)
        ended = [run for run in active.values() if run.phase is Phase.ENDED]
        for run in ended:
            self._progress.forget(run.plan)
        self._finalizer.cancel_rivals(run for run in ended if seen[run.plan.key].has_rivals)
        self._finalizer.conclude(ended)
        self._finalizer.continue_stopping()
        endings = [(run, self._enforce(run, time.monotonic())) for run in self._context.active()]
        self._finalizer.end((run, ending) for run, ending in endings if ending is not None)
        self._finalizer.cancel_again()

    def _poll(self, active: Iterable[Tracked]) -> dict[str, Seen]:
        """Ask the scheduler, and remember how long it took to answer."""
        started = time.monotonic()
        try:
            return self._context.scheduler.poll(self._context.jobs(active))
        finally:
            self.poll_s = time.monotonic() - started

    def _saw(self, run: Tracked, status: JobStatus) -> None:
        """Take note of a status."""
        if status.is_final:
            self._finalizer.record(run, status)
            return
        if run.status is None or (status.state, status.restarts) != (run.status.state, run.status.restarts):
            self._context.has_changed = True
            self._context.journal.saw(run.plan.key, run.number, status)
            self._context.observer.saw(run.plan, status)
            if status.job_class is JobClass.UNKNOWN:
                why = status.reason or "Slurm documents no such state"
                self._context.observer.notice(f"{run.plan.key}: job {run.job_id}: {status.state} ({why})")
        elif (status.reason, status.nodes) != (run.status.reason, run.status.nodes):
            self._context.journal.noticed(run.plan.key, run.number, status)
        if _is_held(status) and not _is_held(run.status):
            within = f"it will be cancelled unless it is released within {self._context.config.patience_s:g} s"
            why = status.reason or status.state
            self._context.observer.notice(f"{run.plan.key}: job {run.job_id} is held ({why}); {within}")
        is_ending = run.ending is not None or status.state == "COMPLETING"
        is_odd, is_unknown = is_ending or status.hopeless is not None, status.job_class is JobClass.UNKNOWN
        run.odd_since = (run.odd_since or time.monotonic()) if is_odd else None
        run.unknown_since = (run.unknown_since or time.monotonic()) if is_unknown else None
        run.status = status

    def _enforce(self, run: Tracked, now: float) -> JobStatus | None:
        """Return as what a job has to end that hangs or can never start; give up one whose state stays unknown."""
        status, config = run.status, self._context.config
        if status is None:
            return None
        odd_s = now - run.odd_since if run.odd_since is not None else 0.0
        if run.unknown_since is not None:  # one answer may have been cut
            if now - run.unknown_since > config.unknown_s:
                self._give_up(run, status, config.unknown_s)
        elif (run.ending is not None or status.state == "COMPLETING") and odd_s > config.patience_s:
            self._give_up(run, status, config.patience_s)
        elif run.ending is not None:
            return None
        elif status.hopeless is not None and odd_s > self._hopeless_s(run, status, odd_s):
            reason = f"the scheduler will never start it: {status.reason or status.state}"
            return JobStatus("REFUSED", status.hopeless, reason=reason)
        elif run.plan.is_pre_test and now - run.submitted_at > config.pre_test_timeout_s:
            reason = f"it did not end in {config.pre_test_timeout_s:g} s"
            return JobStatus("PRE_TEST_TIMEOUT", JobClass.FAILED, reason=reason)
        elif status.state != "RUNNING":
            self._progress.forget(run.plan)
        elif run.plan.hang_timeout_s is not None:
            idle_s, step = self._progress.idle_s(run.plan, run.token or None)
            if idle_s > run.plan.hang_timeout_s:
                return JobStatus("HUNG", JobClass.FAILED, reason=f"no step for {idle_s:.0f} s after step {step}")
        return None

    def _hopeless_s(self, run: Tracked, status: JobStatus, odd_s: float) -> float:
        """Return how long a job may wait for what will not come by waiting; whoever holds one may release it."""
        is_patient = _is_held(status) or (odd_s > HOPELESS_S and self._has_enough_nodes(run, status))
        return self._context.config.patience_s if is_patient else HOPELESS_S

    def _has_enough_nodes(self, run: Tracked, status: JobStatus) -> bool:
        """Return whether a job that waits for nodes wants no more than there are; those that are down may come back."""
        if status.reason != PARTITION_NODE_LIMIT:
            return False
        try:
            num_nodes = self._context.scheduler.num_usable_nodes(run.plan.exclude_nodes)
        except ToolFailure:
            return True  # asked again
        return num_nodes is None or num_nodes >= run.plan.num_nodes

    def _give_up(self, run: Tracked, status: JobStatus, after_s: float) -> None:
        """Give up a job that nobody can tell anything about; one that never started may be submitted again.

        Raises:
            Paused: it was cancelled for an interrupt, after which it would be submitted again, and it still runs.
        """
        if status.state == NEVER_STARTED and (holder := self._context.withdraw(run)) is not None:
            if holder != run.job_id:
                self._context.adopt(run, holder)  # it starts this very moment
                return
            status = replace(status, state=FORGOTTEN)
        is_interrupted = run.ending is not None and run.ending.state == INTERRUPTED.state
        if is_interrupted and status.state not in (NEVER_STARTED, FORGOTTEN, "COMPLETING"):
            raise self._context.pause(f"job {run.job_id} was cancelled but is still {status.state}")
        self._finalizer.cancel([run])
        self._context.observer.notice(
            f"{run.plan.key}: job {run.job_id} is given up as {status.state} and may still run"
        )
        reason = f"{status.reason or status.state}; given up after {after_s:g} s"
        if status.state == NEVER_STARTED:
            status = JobStatus("LOST", JobClass.INFRASTRUCTURE, run_time_s=0.0)
        self._finalizer.record(run, replace(status, job_class=_given_up(status), reason=reason))
        self._finalizer.conclude([run])

    # ---- stop

    def stop(self) -> None:
        """Cancel everything that has a job; what waits stays unsubmitted."""
        self._finalizer.stop(INTERRUPTED)
        self._finalizer.continue_stopping()
        self._submitter.stop()
        self._cancel_returned(self._context.lost())

    def look_while_stopping(self) -> None:
        """Look at the jobs that are ending, and cancel what turns out to have been submitted."""
        self._submitter.resolve_unsure()
        self._finalizer.continue_stopping()
        self.look()
        if self._context.returned:
            self._cancel_returned(self._context.lost())

    def _cancel_returned(self, lost: list[Tracked]) -> None:
        """Cancel jobs that were given up and that the scheduler has again. Their verdicts stay."""
        now = time.monotonic()
        if not lost or now < self._ask_for_lost_after:
            return
        self._ask_for_lost_after = now + _ASK_FOR_LOST_S
        self._stopping_since = self._stopping_since or now
        context = self._context
        try:
            seen = context.scheduler.poll(context.jobs(lost))
            running = [run for run in lost if seen[run.plan.key].status.job_class is JobClass.ACTIVE]
            if running:
                context.scheduler.cancel(context.jobs(running))
        except ToolFailure as error:
            context.returned = [run.job_id for run in lost]  # as far as anybody knows
            context.tolerate(error)
            return
        context.answered()
        if running and not context.returned:
            names = ", ".join(seen[run.plan.key].job_id for run in running)
            context.observer.notice(f"cancelling {names}: given up earlier, but running")
        context.returned = [seen[run.plan.key].job_id for run in running]
        if running and now - self._stopping_since > context.config.patience_s:
            raise context.pause("jobs that were given up are still running")


def _is_held(status: JobStatus | None) -> bool:
    return status is not None and status.hopeless is JobClass.CANCELLED


def _given_up(status: JobStatus) -> JobClass:
    return status.job_class if status.job_class is JobClass.INFRASTRUCTURE else JobClass.LOST
