"""What all parts of the runner share: the runs, the journal, the scheduler, and when it did not respond."""

import time
from collections.abc import Iterable
from pathlib import Path

from cloudai_mbridge.errors import Paused, ToolFailure
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.runner.journal.journal import Journal
from cloudai_mbridge.runner.journal.submission_log import SubmissionLog
from cloudai_mbridge.runner.tracked import FAILED, SKIPPED, Observer, Phase, Tracked
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Scheduler, Submission


class RunnerContext:
    """The runs of a plan on their way to their ends.

    unsure: submissions, by token, of which nobody knows whether the scheduler took them; doubts: what it said of some
    of them, after which they are refused if it did not. returned: jobs that were given up, and run. log: of all
    submissions. stop: what active runs end as, if everything is to end. has_changed: something has happened since it
    was last set to False.
    """

    def __init__(
        self, plan: ScenarioPlan, root: Path, scheduler: Scheduler, journal: Journal, observer: Observer
    ) -> None:
        self.root, self.scheduler, self.journal, self.observer = root, scheduler, journal, observer
        self.config = plan.runner
        self.runs = [Tracked(run) for run in plan.runs]
        self.by_key = {run.plan.key: run for run in self.runs}
        self.log = SubmissionLog(root)
        self.unsure: dict[str, Submission] = {}
        self.doubts: dict[str, str] = {}
        self.returned: list[str] = []
        self.stop: JobStatus | None = None
        self.has_changed = False
        self._silent_since: float | None = None

    @property
    def is_over(self) -> bool:
        return all(run.phase is Phase.ENDED for run in self.runs)

    def active(self) -> list[Tracked]:
        """Return the runs that have a job."""
        return [run for run in self.runs if run.phase is Phase.ACTIVE]

    def lost(self) -> list[Tracked]:
        """Return the runs that have ended since nobody knows what became of their jobs, which may still run."""
        ended = (run for run in self.runs if run.phase is Phase.ENDED and run.job_id)
        return [run for run in ended if run.status is not None and run.status.job_class is JobClass.LOST]

    def may_still_run(self) -> list[str]:
        """Return the ids of the jobs whose end nobody has seen."""
        active = [run.job_id for run in self.active()]
        return active + self.returned + [f"a submission as {token}" for token in self.unsure]

    def jobs(self, runs: Iterable[Tracked]) -> list[Job]:
        """Return the current jobs of runs."""
        return [run.job(self.root) for run in runs]

    def adopt(self, run: Tracked, job_id: str) -> None:
        """Follow a job of a run's current attempt, which another one had been taken for."""
        if run.job_id:
            self.observer.notice(f"{run.plan.key}: its job is {job_id}, not {run.job_id}")
        self.journal.submitted(run.plan.key, run.number, job_id)
        run.phase, run.job_id, run.odd_since, run.unknown_since = Phase.ACTIVE, job_id, None, None
        self.has_changed = True

    def withdraw(self, run: Tracked) -> str | None:
        """See to it that no job of a run's current attempt trains; return the job that already does.

        Raises:
            OSError: the claim cannot be written.
        """
        return take_claim(self.root / run.plan.key, run.token, None)

    def skip(self, runs: Iterable[Tracked], reason: str) -> None:
        """Decide that runs are not submitted, or not again."""
        for run in runs:
            self.has_changed = True
            run.phase = Phase.ENDED
            verdict, note = (FAILED, f"not retried: {reason}") if run.number else (SKIPPED, "")
            self.journal.decided(run.plan.key, verdict, [reason], note)
            self.observer.saw(run.plan, JobStatus("SKIPPED", JobClass.SKIPPED, reason=reason))

    def tolerate(self, error: ToolFailure) -> None:
        """Wait for a scheduler that does not answer, but not for ever.

        Raises:
            Paused: it has not answered for too long.
        """
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.observer.notice(f"{error}; asking again")
            self.journal.note(str(error))
        if now - self._silent_since > self.config.patience_s:
            raise self.pause(str(error))

    def pause(self, why: str) -> Paused:
        """Return the exception that ends this process and says what goes on without it."""
        jobs = ", ".join(self.may_still_run()) or "nothing"
        text = f"{why}; paused after {self.config.patience_s:g} s; may still run: {jobs}"
        return Paused(f"{text}; continue with: mbridge resume {self.root}")

    def answered(self) -> None:
        """Take note that the scheduler has answered."""
        if self._silent_since is not None:
            self._silent_since = None
            self.observer.notice("the scheduler answers again")
            self.journal.note("the scheduler answers again")
