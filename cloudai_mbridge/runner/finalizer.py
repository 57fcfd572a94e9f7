"""End runs: cancel jobs, judge attempts, exclude nodes, and retry infrastructure failures."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from cloudai_mbridge.errors import BadInput, ToolFailure, counted
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.runner.context import Judge, Phase, RunnerContext, Tracked
from cloudai_mbridge.schedulers.interface import FORGOTTEN, JobClass, JobStatus
from cloudai_mbridge.verdict import PROGRAM_MISSING, Judgement

_ASK_AGAIN_S = 30.0
_CANCEL_AGAIN_S = 10.0
# Of nodes on which a test could not start for one reason: how many are excluded for it before it has run elsewhere, and
# how many show that it is not theirs
_MOST_ACCUSED, _ENOUGH_NODES = 3, 8
_AT_A_TIME = 20
INTERRUPTED = JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped")


def ended_as(status: JobStatus, ending: JobStatus | None) -> JobStatus:
    """Return the status with which an attempt has ended. ending: of a job that the runner has cancelled."""
    # An interrupted attempt is submitted again, except if its job has started and its end is unknown
    is_forgotten = status.state == FORGOTTEN and ending is not None and ending.state == INTERRUPTED.state
    if ending is None or not status.is_final or status.job_class is JobClass.SUCCEEDED or is_forgotten:
        return status
    return replace(status, state=ending.state, job_class=ending.job_class, reason=ending.reason)


class Finalizer:
    """Ends attempts, and decides about retries and excluded nodes."""

    def __init__(self, context: RunnerContext, judge: Judge, check: Callable[[], None] = lambda: None) -> None:
        """check: called between judgements, of which there may be thousands; it raises if a signal has come."""
        self._context, self._judge, self._check = context, judge, check
        self._unjudged: list[Tracked] = []
        self._cancelled_at = 0.0
        self.excluded = context.journal.excluded()  # node -> reason
        self._usable: int | None = None
        self._asked_at = float("-inf")
        # test, failure -> nodes on which none of the test's jobs could start because of it
        self._unstarted: dict[tuple[str, str], set[str]] = {}
        self._ran: set[str] = set()  # tests of which a run succeeded

    def end(self, endings: Iterable[tuple[Tracked, JobStatus]]) -> None:
        """Cancel jobs, all in one call; each will then count as its ending."""
        ending_of = list(endings)
        for run, ending in ending_of:
            what = f"{ending.state}, {ending.reason}"
            self._context.observer.notice(f"{run.plan.key}: cancelling job {run.job_id}: {what}")
        self._end(ending_of)

    def _end(self, endings: Sequence[tuple[Tracked, JobStatus]]) -> None:
        with self._context.journal.transaction():
            for run, ending in endings:
                run.ending, run.odd_since = ending, None
                self._context.journal.ending(run.plan.key, run.number, ending)
        if endings:
            self.cancel(run for run, _ in endings)

    def stop(self, ending: JobStatus) -> None:
        """From now on have every job cancelled and nothing submitted; `continue_stopping` does it."""
        self._context.stop = ending
        num_active = len(self._context.active())
        if num_active:
            self._context.observer.notice(f"cancelling {counted(num_active, 'active job')}")
        self._context.observer.stopping()

    def continue_stopping(self) -> None:
        """If everything is to end, cancel the jobs that are not being cancelled yet."""
        if (ending := self._context.stop) is None:
            return
        if ending.state != INTERRUPTED.state:  # after an interrupt, `mbridge resume` submits the waiting runs
            self._context.skip([run for run in self._context.runs if run.phase is Phase.WAITING], ending.reason)
        self._end([(run, ending) for run in self._context.active() if run.ending is None])

    def cancel(self, runs: Iterable[Tracked]) -> None:
        """Ask the scheduler to end jobs."""
        self._cancelled_at = time.monotonic()
        try:
            self._context.scheduler.cancel(self._context.jobs(runs))
        except ToolFailure as error:
            self._context.tolerate(error)

    def cancel_duplicates(self, runs: Iterable[Tracked]) -> None:
        """Cancel the other jobs under the tokens of runs that have ended."""
        if ended := list(runs):
            names = ", ".join(run.plan.key for run in ended)
            self._context.observer.notice(f"{names}: cancelling further jobs of the same submission")
            self.cancel(ended)

    def cancel_again(self) -> None:
        """Cancel jobs that are to end and have not, in case the first request was lost."""
        late = [run for run in self._context.active() if run.ending is not None]
        if late and time.monotonic() - self._cancelled_at > _CANCEL_AGAIN_S:
            self.cancel(late)

    def record(self, run: Tracked, status: JobStatus) -> None:
        """Record that an attempt has ended; a job that the runner cancelled gets the status it was cancelled with.

        If another job has claimed the attempt, it has not ended, and that job is followed from now on.
        """
        holder = self._context.withdraw(run)
        if holder not in (None, run.job_id):
            self._context.adopt(run, holder)
            return
        status = ended_as(status, run.ending)
        self._context.has_changed = True
        run.phase, run.late_since = Phase.ENDED, None
        run.end_attempt(status)
        self._context.journal.saw(run.plan.key, run.number, status)
        self._context.observer.saw(run.plan, status)

    def conclude(self, runs: Iterable[Tracked]) -> None:
        """Judge attempts that have ended, then write down the decisions; a few in one transaction.

        What `check` interrupts is continued by the next call, or by `mbridge resume`.
        """
        self._unjudged += [run for run in runs if run.phase is Phase.ENDED]
        while self._unjudged:
            self._check()
            few = self._unjudged[:_AT_A_TIME]
            judged = [(run, self._judge(run.plan, self._context.journal.entry(run.plan.key))) for run in few]
            with self._context.journal.transaction():
                for run, judgement in judged:
                    self._conclude(run, judgement)
            del self._unjudged[: len(few)]

    @property
    def has_unjudged(self) -> bool:
        """Whether attempts have ended that are not judged."""
        return bool(self._unjudged)

    def _conclude(self, run: Tracked, judgement: Judgement) -> None:
        """Retry infrastructure failures, and elsewhere what could not start; record the verdict of everything else."""
        run.phase = Phase.ENDED
        if run.status is not None and run.status.state == INTERRUPTED.state and self._context.stop is None:
            run.phase = Phase.WAITING  # an earlier process was stopped, this one continues the run
            return
        note = ""
        if judgement.is_infrastructure or judgement.are_suspects:
            why = self._why_the_same(run, judgement) or self._why_not_retried(run)
            if not why:
                run.phase, run.not_before = Phase.WAITING, time.monotonic() + 4.0**run.num_retries
                run.num_retries += 1
                self._context.journal.failed(run.plan.key, run.number, judgement.failure)
                count = f"{run.num_retries} of {self._context.config.retries} retries"
                text = f"attempt {run.number} failed: {judgement.failure}; trying again ({count})"
                self._context.observer.notice(f"{run.plan.key}: {text}")
                return
            note = f"not retried: {why}"
            self._context.observer.notice(f"{run.plan.key}: {note}")
        if judgement.is_success:
            self._ran.add(run.plan.test_id)
            self._exclude_avoided(run)
        self._context.journal.decided(run.plan.key, judgement.verdict, judgement.reasons, note)
        self._context.observer.decided(run.plan, judgement.verdict, tuple(judgement.reasons))
        if not judgement.is_success and (run.status is None or run.status.state != INTERRUPTED.state):
            self.follow_failure(run, judgement.reasons)

    def follow_failure(self, run: Tracked, reasons: Iterable[str]) -> None:
        """Act on a failed run: exclude a pre-test's node; after a hook or with fail_fast, stop everything."""
        # A failed trial is a result for its search
        is_fast_to_fail = self._context.config.fail_fast and run.plan.search is None
        if run.plan.is_pre_test:
            self.exclude(run.plan.label, f"pre_test failed: {'; '.join(reasons)}")
        elif self._context.stop is None and (run.plan.is_gate or is_fast_to_fail):
            what = "the pre_test hook" if run.plan.is_gate else "fail_fast:"
            self.stop(JobStatus("CANCELLED", JobClass.CANCELLED, reason=f"{what} {run.plan.key} failed"))

    def _why_not_retried(self, run: Tracked) -> str:
        if self._context.stop is not None:
            return self._context.stop.reason
        if run.plan.is_pre_test:
            return "a pre-test is run once"
        if run.num_retries >= (most := self._context.config.retries):
            return f"runner.retries = {most}"
        return self.shortage_for(run)

    def _why_the_same(self, run: Tracked, judgement: Judgement) -> str:
        """Accuse the nodes of a failed attempt; return why it would fail on any other node too, "" if it might not."""
        failure = judgement.failure
        if failure == PROGRAM_MISSING and run.plan.container_image:
            return "the image is the same on other nodes"
        if not judgement.are_suspects:
            self.blame(run, failure, judgement.nodes)
            return ""
        suspects = _own_nodes(run, judgement.nodes)
        seen = self._unstarted.setdefault((run.plan.test_id, failure), set())
        seen.update(suspects)
        self.blame(run, failure, judgement.nodes if self._are_few(seen) else (), are_suspects=True)
        if self._has_others(run, {*self.excluded, *run.avoids, *suspects}):
            run.avoids |= dict.fromkeys(suspects, failure)
        is_everywhere = len(seen) >= _ENOUGH_NODES and run.plan.test_id not in self._ran
        if suspects and not is_everywhere and self._has_others(run, {*self.excluded, *seen}):
            return ""
        why = f"{failure} was the same on every node tried: {', '.join(sorted(seen)) or 'unknown'}"
        self._readmit(f"{failure} in {run.plan.test_id}/", why)
        run.avoids.clear()
        return "" if judgement.is_infrastructure else why  # it may pass, so the last nodes are tried again

    def _are_few(self, nodes: Collection[str]) -> bool:
        """Return whether nodes on which a test could not start are few, so that the others are no worse without them.

        The runs that have not ended, the largest of them too, have enough others.
        """
        total, left = self._num_usable(()), self._num_usable({*self.excluded, *nodes})
        ongoing = (run.plan.num_nodes for run in self._context.runs if run.phase is not Phase.ENDED)
        is_enough = left is not None and left >= max(ongoing, default=1)
        return is_enough and total is not None and 2 * len(nodes) <= total and len(nodes) <= _MOST_ACCUSED

    def _exclude_avoided(self, run: Tracked) -> None:
        """Exclude the nodes on which a run could not start, now that it has run elsewhere."""
        for node, failure in run.avoids.items():
            if self._are_few([node]):
                self.exclude(node, f"{failure} in {run.plan.key}, which ran elsewhere")

    def _readmit(self, prefix: str, why: str) -> None:
        """Use the nodes again that were excluded for a reason with this prefix."""
        for node in [node for node, reason in self.excluded.items() if reason.startswith(prefix)]:
            del self.excluded[node]
            self._asked_at = float("-inf")
            self._context.journal.readmit(node, why)
            self._context.observer.notice(f"node {node} is used again: {why}")

    def excluded_for(self, runs: Sequence[Tracked]) -> tuple[str, ...]:
        """Return the nodes that a submission of runs excludes. runs: they avoid the same nodes."""
        avoided = {*self.excluded, *runs[0].avoids}
        is_enough = not runs[0].avoids or all(self._has_others(run, avoided) for run in runs)
        return tuple(sorted(avoided if is_enough else self.excluded))

    def exclude(self, node: str, reason: str) -> None:
        """Exclude a node from further jobs."""
        if node not in self.excluded:
            self.excluded[node] = reason
            self._asked_at = float("-inf")
            self._context.journal.exclude(node, reason)
            self._context.observer.notice(f"node {node} is excluded: {reason}")

    def blame(self, run: Tracked, failure: str, named: Iterable[str], *, are_suspects: bool = False) -> None:
        """Exclude a run's nodes that the evidence against it names, or that are out of service.

        are_suspects: on the named nodes a job could not start. If it could start nowhere, nodes are left to try.
        """
        key = run.plan.key
        bad = dict.fromkeys(_own_nodes(run, named), f"{failure} in {key}")
        unhealthy: dict[str, str] = {}
        if run.status is not None and run.status.nodes:
            try:
                unhealthy = self._context.scheduler.unhealthy_nodes(run.status.nodes)
            except ToolFailure as error:
                self._context.observer.notice(f"{error}; it is unknown which node failed {key}")
        bad |= {node: f"{state} after {failure} in {key}" for node, state in unhealthy.items()}
        for node, reason in bad.items():
            if not are_suspects or node in unhealthy or self._has_others(run, {*self.excluded, node}):
                self.exclude(node, reason)

    def _has_others(self, run: Tracked, nodes: Collection[str]) -> bool:
        """Return whether a run has enough nodes other than these; False if unknown."""
        if not {name for named in run.plan.nodes for name in expand_hostlist(named)}.isdisjoint(nodes):
            return False
        usable = self._num_usable(nodes)
        return usable is not None and usable >= run.plan.num_nodes

    def _num_usable(self, exclude: Collection[str]) -> int | None:
        """Return how many nodes are left without some, None if unknown."""
        try:
            return self._context.scheduler.num_usable_nodes(exclude)
        except ToolFailure:
            return None

    def shortage_for(self, run: Tracked) -> str:
        """Return why a run cannot have the nodes that it needs, "" if it can."""
        if not self.excluded or run.plan.is_pre_test:
            return ""
        needed = {name for nodes in run.plan.nodes for name in expand_hostlist(nodes)}
        if named := sorted(needed & set(self.excluded)):
            return f"it needs node {', '.join(named)}, which is excluded ({self.excluded[named[0]]})"
        if time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            try:
                self._usable = self._context.scheduler.num_usable_nodes(self.excluded)
            except ToolFailure:
                return ""  # the scheduler itself will report the problem
            self._asked_at = time.monotonic()
        if (usable := self._usable) is None or usable >= run.plan.num_nodes:
            return ""
        excluded = "; ".join(f"{node} ({reason})" for node, reason in sorted(self.excluded.items()))
        left = f"{counted(usable, 'node')} {'is' if usable == 1 else 'are'} left"
        return f"{left} of the {run.plan.num_nodes} it needs; excluded: {excluded}"


def _own_nodes(run: Tracked, named: Iterable[str]) -> list[str]:
    """Return the nodes of a run's job that a log names: it may contain anything."""
    own = _names(run.status.nodes) if run.status is not None else []
    blamed = {name for nodes in named for full in _names(nodes) for name in (full, full.partition(".")[0])}
    return [node for node in own if node in blamed]


def _names(nodes: str) -> list[str]:
    """Return the nodes of a list from a log, which may contain anything."""
    try:
        return expand_hostlist(nodes)
    except BadInput:
        return []
