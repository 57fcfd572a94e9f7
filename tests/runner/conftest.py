"""A sweep on a bench: a fake scheduler that follows a script, and a clock that moves when somebody sleeps."""

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner import Journal, Judgement, Pace, run_all
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Seen, Submission
from tests.runs import planned_run

Answer = JobStatus | BaseException | signal.Signals
PENDING = JobStatus("PENDING", JobClass.ACTIVE)
RUNNING = JobStatus("RUNNING", JobClass.ACTIVE, nodes="n1", run_time_s=1.0)
COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0, nodes="n1", run_time_s=60.0)
CANCELLED = JobStatus("CANCELLED", JobClass.CANCELLED, signal=15, nodes="n1", run_time_s=60.0)


class Clock:
    """Stands in for `time` while a sweep runs; nobody really sleeps."""

    LONGEST = 1e6

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.now += max(seconds, 0.0)
        if self.now > self.LONGEST:
            raise AssertionError("the sweep does not end")


class FakeScheduler:
    """A scheduler that follows a script: by test or run key, what each look at a job shows; the last answer stays.

    A script may be a list of lists, one for each attempt. A signal in it comes while the scheduler is being asked, an
    exception is its answer.
    """

    def __init__(self, clock: Clock, **script: list[Any]) -> None:
        self._clock = clock
        self.script: dict[str, list[Any]] = dict(script)
        self.events: list[str] = []
        self.submissions: list[Submission] = []
        self.cancelled: list[str] = []
        self.refuse: dict[str, list[BaseException]] = {}  # test -> what its submissions raise, in order
        self.signal_at: str | None = None  # the test whose submission a signal interrupts
        self.ignores_cancel = 0  # how many looks a cancelled job still runs for
        self.taken_at: dict[int, float] = {}  # n-th submission -> when `find` sees what raised ToolFailure
        self.hidden: set[str] = set()  # run keys that `find` does not see
        self.find_error: list[BaseException] = []
        self.cancel_error: list[BaseException] = []
        self.unhealthy: dict[str, str] = {}
        self.usable: int | None = None
        self.together = False  # one batch for all runs of an array
        self._looks: dict[str, Iterator[Answer]] = {}
        self._key_of: dict[str, str] = {}
        self._tokens: dict[str, tuple[float, dict[str, str]]] = {}
        self._last: dict[str, Answer] = {}
        self._attempts: dict[str, int] = {}

    def preflight(self) -> None:
        """Nothing to check."""

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        if not self.together:
            return [(run,) for run in runs]
        groups: dict[str, list[RunPlan]] = {}
        for run in runs:
            groups.setdefault(run.array or run.key, []).append(run)
        return [tuple(group) for group in groups.values()]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        self.submissions.append(submission)
        first = submission.runs[0]
        number = len(self.submissions)
        if waiting := self.refuse.get(first.test_id):
            error = waiting.pop(0)
            self.events.append(f"refuse {first.test_id}")
            if number in self.taken_at:
                self.start(submission, self.taken_at[number])
            raise error
        ids = self.start(submission, 0.0)
        self.events += [f"submit {run.test_id}" for run in submission.runs]
        if first.test_id == self.signal_at:
            signal.raise_signal(signal.SIGINT)
        return ids

    def start(self, submission: Submission, seen_at: float = 0.0) -> dict[str, str]:
        """Have the jobs of a submission, as Slurm has them: known by its token from `seen_at` on."""
        ids = {run.key: str(100 + len(self._key_of) + i) for i, run in enumerate(submission.runs)}
        self._tokens[submission.token] = (seen_at, ids)
        for run in submission.runs:
            self.add(ids[run.key], run.key)
        return ids

    def add(self, job_id: str, key: str) -> None:
        """Have a job."""
        attempt = self._attempts[key] = self._attempts.get(key, 0) + 1
        script = self.script.get(key, self.script.get(key.split("/")[0], [RUNNING, COMPLETED]))
        if script and isinstance(script[0], list):
            script = script[min(attempt, len(script)) - 1]
        self._key_of[job_id], self._looks[job_id] = key, iter(script)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        if self.find_error:
            raise self.find_error.pop(0)
        found = {}
        for submission in submissions:
            seen_at, ids = self._tokens.get(submission.token, (0.0, {}))
            if self._clock() >= seen_at:
                wanted = [run.key for run in submission.runs if run.key not in self.hidden]
                found |= {key: ids[key] for key in wanted if key in ids}
        return found

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        return {job.key: Seen(job.job_id, self._look(job.job_id, job.directory)) for job in jobs}

    def _look(self, job_id: str, directory: Path) -> JobStatus:
        key = self._key_of[job_id]
        assert str(directory).endswith(key)
        answer = self._answer(job_id)
        if isinstance(answer, signal.Signals):
            signal.raise_signal(answer)
            answer = RUNNING
        if isinstance(answer, BaseException):
            raise answer
        self.events.append(f"{answer.state} {key.split('/')[0]}")
        return answer

    def _answer(self, job_id: str) -> Answer:
        last = self._last.get(job_id)
        if job_id in self.cancelled and not (isinstance(last, JobStatus) and last.is_final):
            self.ignores_cancel -= 1
            answer: Answer = RUNNING if self.ignores_cancel >= 0 else CANCELLED
        else:
            answer = next(self._looks[job_id], last if last is not None else RUNNING)
        self._last[job_id] = answer
        return answer

    def cancel(self, jobs: Iterable[Job]) -> None:
        ids = [job.job_id for job in jobs]
        self.events.append(f"cancel {len(ids)}")
        if self.cancel_error:
            raise self.cancel_error.pop(0)
        self.cancelled += ids

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        return {node: state for node, state in self.unhealthy.items() if node in nodes}

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        return None if self.usable is None else self.usable - len(list(exclude))

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        return status.reason == "nodes are down" and (self.usable is None or self.usable >= run.num_nodes)

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        return ""


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.notices: list[str] = []
        self.verdicts: dict[str, str] = {}

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        self.verdicts[run.key] = verdict

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        self.seen.append(f"{run.test_id} {status.state}")

    def stopping(self) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        self.notices.append(text)


def judge(run: RunPlan, entry: JournalEntry) -> Judgement:
    """Judge by the job's end alone; a reason "node X" is evidence against X, and "suspect X" that it did not start."""
    assert entry.last is not None
    status = entry.last.status
    assert status is not None
    if status.job_class in (JobClass.SUCCEEDED, JobClass.STOPPED):
        return Judgement("success", (), is_success=True)
    word, _, node = status.reason.partition(" ")
    nodes, are_suspects = ((node,) if word in ("node", "suspect") else ()), word == "suspect"
    is_infrastructure = status.job_class is JobClass.INFRASTRUCTURE
    return Judgement("failed", (status.state,), False, status.state.lower(), is_infrastructure, nodes, are_suspects)


class Bench:
    """A root, a fake scheduler, a clock and an observer. A second `drive` is a second process in the same root."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root, self.clock = root, clock
        self.scheduler = FakeScheduler(clock)
        self.notes = Notes()
        self.judge: Any = judge

    def script(self, **script: list[Any]) -> FakeScheduler:
        """Say what each look at the jobs shows."""
        self.scheduler.script |= script
        return self.scheduler

    @staticmethod
    def run(test_id: str, point: int = 0, **keys: Any) -> RunPlan:
        return planned_run(test_id, point, **{"ranks_per_node": 1, **keys})

    def drive(
        self,
        *runs: RunPlan,
        only_cancel: bool = False,
        pace: Pace | None = None,
        may_be_late: bool = False,
        **config: Any,
    ) -> Notes:
        """Drive the runs to their end; `config` is the [runner] table."""
        for run in runs:
            (self.root / run.key).mkdir(parents=True, exist_ok=True)
        plan = ScenarioPlan("s", "fake", runs, (), runner=RunnerConfig.model_validate(config))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", self.clock)
            patch.setattr(time, "sleep", self.clock.sleep)
            patch.setattr(Progress.__init__, "__defaults__", (self.clock,))  # bound before this patch
            run_all(
                plan,
                self.root,
                self.scheduler,
                self.notes,
                self.judge,
                pace=pace or Pace(1.0, 1.0, self.clock),
                only_cancel=only_cancel,
                may_be_late=may_be_late,
            )
        return self.notes

    @property
    def path(self) -> Path:
        return self.root / "journal.sqlite"

    def write(self, *keys: str) -> Journal:
        """Open the journal, to write what an earlier process has left."""
        journal = Journal(self.path)
        journal.plan(keys)
        return journal

    def entries(self) -> dict[str, JournalEntry]:
        journal = Journal(self.path)
        try:
            return journal.entries()
        finally:
            journal.close()

    def events(self) -> list[str]:
        journal = Journal(self.path)
        try:
            return [event.text for event in journal.events()]
        finally:
            journal.close()

    def excluded(self) -> dict[str, str]:
        journal = Journal(self.path)
        try:
            return journal.excluded()
        finally:
            journal.close()

    def states(self) -> dict[str, list[str | None]]:
        """Return the states of each run's attempts."""
        return {
            key: [attempt.status.state if attempt.status else None for attempt in entry.attempts]
            for key, entry in self.entries().items()
        }

    def verdicts(self) -> dict[str, str | None]:
        return {key: entry.verdict for key, entry in self.entries().items()}

    def tests(self, verb: str) -> list[str]:
        """Return the tests to which something happened, in order."""
        return [event.split()[1] for event in self.scheduler.events if event.split()[0] == verb]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(tmp_path: Path, clock: Clock) -> Bench:
    return Bench(tmp_path, clock)
