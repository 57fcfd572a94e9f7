"""Whatever sbatch, the controller and the driver's own deaths do: no job unseen, no point trained twice.

The runner, the Slurm client and the claims are the real ones, on real files. What Slurm's commands do is simulated by
an adversary that draws from a seed: it accepts and refuses, now and late, tells the truth and lies, submits twice or in
part, forgets, starts again, takes the journal away, and kills the driver before and after every command and every
write. The claim in a job's script is played by `take_claim`; tests/launch/test_claim.py compares it with bash.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import MBridgeError, ToolFailure
from cloudai_mbridge.launch.claim import LOST_CLAIM, take_claim
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner import Journal, Judgement, Pace, context, run_all, submitter
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.runner.journal import JournalEntry, SubmissionLog
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.schedulers.interface import JobClass
from cloudai_mbridge.schedulers.slurm import SlurmClient, client, jobs
from tests.figures import Figure
from tests.runs import planned_run, slurm_system

SYSTEM = slurm_system()
RUNNER = RunnerConfig(unknown_s=60.0, patience_s=300.0, max_parallel=None)
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
UNKNOWN_WORDS = ("Unspecified error", "Insane message length", "Message receive failure", "Who knows")
SBATCH = {
    "accept": 30,
    "accept and die": 4,
    "refuse": 1,
    "busy": 3,
    "time out": 4,
    "time out and accept": 4,
    "time out and accept late": 5,
    "error and accept": 6,
    "error and accept late": 4,
    "error": 2,
    "wrong id": 6,
    "id of another": 4,
    "silence": 3,
    "twice": 6,
    "in part": 4,
    "killed": 3,
}


class Died(BaseException):
    """The driver was killed."""


@dataclass
class SimJob:
    """A job or a task of an array."""

    job_id: str
    name: str
    directory: Path
    index: int
    accepted_at: float
    starts_at: float
    runs_s: float
    state: str = "PENDING"
    exit_code: int = 0
    is_forgotten: bool = False
    has_trained: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    forgotten_s: float = 0.0

    @property
    def token(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass
class World:
    """A cluster with a will of its own, and a clock that moves when somebody sleeps."""

    root: Path
    rng: random.Random
    keys: list[str]
    now: float = 1000.0
    jobs: list[SimJob] = field(default_factory=list)
    late: list[SimJob] = field(default_factory=list)
    steps: int = 0
    deaths_left: int = 0
    faults_until: float = 1500.0
    is_deaf: bool = False  # scancel says that it succeeds, and does nothing
    next_id: int = 1000
    counted: Counter[str] = field(default_factory=Counter)
    bare_arrays: dict[str, str] = field(default_factory=dict)

    # ---- the adversary

    @property
    def is_hostile(self) -> bool:
        return self.now < self.faults_until

    def chance(self, probability: float) -> bool:
        return self.is_hostile and self.rng.random() < probability

    def may_die(self, where: str) -> None:
        self.steps += 1
        if self.deaths_left and self.chance(0.03):
            self.deaths_left -= 1
            self.counted[f"died {where}"] += 1
            raise Died(where)

    # ---- time

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.steps += 1
        elapsed_s = max(seconds, 0.01)
        self.now += elapsed_s
        for job in self.jobs:
            job.forgotten_s += elapsed_s if job.is_forgotten else 0.0
        if self.now > 1e5:
            raise AssertionError("the sweep does not end")
        self.advance()

    def advance(self) -> None:
        """Let the jobs go on."""
        for job in [job for job in self.late if job.accepted_at <= self.now]:
            self.late.remove(job)
            self.jobs.append(job)
        for job in self.jobs:
            if job.state == "PENDING" and self.now >= job.starts_at:
                self.start(job)
            elif job.state == "RUNNING" and self.now >= job.started_at + job.runs_s:
                self.end(job)
            elif job.state in FINAL and not job.is_forgotten and self.now > job.ended_at + 30 and self.chance(0.05):
                job.is_forgotten = True

    def start(self, job: SimJob) -> None:
        """Do what the job's script does first."""
        job.is_forgotten = False
        if self.chance(0.02):  # the controller was restored from an old state: the job is gone
            job.state, job.is_forgotten, job.ended_at = "CANCELLED", True, self.now
            return
        directory = job.directory.resolve()
        if take_claim_on_node(directory, job.token, job.job_id) != job.job_id:
            job.state, job.exit_code, job.ended_at = "FAILED", LOST_CLAIM, self.now
            return
        (directory / "exit_code.txt").unlink(missing_ok=True)
        with (directory / "started.txt").open("a") as file:
            file.write(f"job={job.job_id} name={job.name} restarts=0 nodes=n1\n")
        job.state, job.started_at = "RUNNING", self.now
        if self.chance(0.03):  # the controller forgets it, and it goes on
            job.is_forgotten = True

    def end(self, job: SimJob) -> None:
        job.ended_at = self.now
        if self.chance(0.05):  # the controller starts it again: a cold start, or an administrator
            job.state, job.starts_at = "PENDING", self.now + self.rng.uniform(0, 20)
            return
        if self.chance(0.08):
            job.state, job.exit_code = "NODE_FAIL", 1
            return
        job.state, job.exit_code, job.has_trained = "COMPLETED", 0, True
        (job.directory.resolve() / "exit_code.txt").write_text("0\n")

    # ---- the commands

    def run(self, *argv: str, **_: Any) -> CompletedProcess[str]:
        """Stand in for `slurm.commands.run_command`."""
        self.may_die(f"before {argv[0]}")
        answer = getattr(self, argv[0])(argv)
        self.may_die(f"after {argv[0]}")
        assert isinstance(answer, CompletedProcess)
        return answer

    def sbatch(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
        indices = _indices(options["array"]) if "array" in options else [None]
        kinds = [kind for kind in SBATCH if kind != "in part" or len(indices) > 1]
        kind = self.rng.choices(kinds, [SBATCH[kind] for kind in kinds])[0] if self.is_hostile else "accept"
        self.counted[f"sbatch: {kind}"] += 1
        name, directory = options["job-name"], Path(options["chdir"])
        refused = "sbatch: error: Batch job submission failed: "
        late_s = self.rng.uniform(20, 200) if "late" in kind else 0.0
        if "accept" in kind or kind in ("wrong id", "id of another", "silence", "twice", "in part", "killed"):
            accepted = self.rng.sample(indices, len(indices) // 2) if kind == "in part" else indices
            job_id = self.accept(name, directory, accepted, late_s)
            if kind == "twice":
                self.accept(name, directory, indices, self.rng.choice((0.0, 5.0, 40.0)))
        if kind == "accept and die":
            self.deaths_left = max(self.deaths_left - 1, 0)
            raise Died("in sbatch")
        if kind in ("accept", "twice", "in part"):
            return CompletedProcess((), 0, f"{job_id}\n", "")
        if kind == "wrong id":
            return CompletedProcess((), 0, f"{job_id[: self.rng.randint(1, len(job_id) - 1)]}\n", "")
        if kind == "id of another":
            return CompletedProcess(
                (), 0, f"{self.rng.choice(['7', *(job.job_id for job in self.jobs)]).partition('_')[0]}\n", ""
            )
        if kind == "silence":
            return CompletedProcess((), 0, "", "")
        if kind == "killed":
            return CompletedProcess((), -9, "", "")
        if kind == "busy":
            return CompletedProcess((), 1, "", f"{refused}Resource temporarily unavailable\n")
        if kind == "refuse":
            return CompletedProcess((), 1, "", f"{refused}Invalid qos specification\n")
        if kind.startswith("error"):
            return CompletedProcess((), 1, "", f"{refused}{self.rng.choice(UNKNOWN_WORDS)}\n")
        raise ToolFailure("sbatch did not respond within 60 s")

    def accept(self, name: str, directory: Path, indices: list[int | None], late_s: float) -> str:
        self.next_id += self.rng.randint(1, 9)
        for index in indices:
            job_id = str(self.next_id) if index is None else f"{self.next_id}_{index}"
            where = directory if index is None else directory / "arrays" / "0" / str(index)
            at = self.now + late_s
            starts_at = at + self.rng.uniform(0, 40)
            runs_s = self.rng.uniform(1, 900 if self.is_deaf else 60)
            job = SimJob(job_id, name, where, index or 0, at, starts_at, runs_s)
            (self.late if late_s else self.jobs).append(job)
        return str(self.next_id)

    def squeue(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        if self.chance(0.1):
            return CompletedProcess((), 1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
        rows = ["7|RUNNING|None|n9|0|0|1:00|somebody.elses|"]
        for job in self.jobs:
            if not job.is_forgotten:
                code = job.exit_code << 8
                rows.append(f"{job.job_id}|{job.state}|None|n1|{code}|0|1:00|{job.name}|")
        rows += [f"{job_id}|CANCELLED|None||0|0|0:00|{name}|" for job_id, name in self.bare_arrays.items()]
        text = "\n".join(rows) + "\n"
        return CompletedProcess((), 0, text[: self.rng.randrange(len(text))] if self.chance(0.05) else text, "")

    def sacct(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        if self.rng.random() < 0.3:
            return CompletedProcess((), 1, "", "sacct: error: Connection refused\n")
        ids = set(argv[-1].partition("=")[2].split(","))
        rows = ["7|COMPLETED|0:0|n9|60|somebody.elses"]
        for job in self.jobs:
            if job.state in FINAL and job.job_id.partition("_")[0] in ids and self.rng.random() < 0.7:
                rows.append(f"{job.job_id}|{job.state}|{job.exit_code}:0|n1|60|{job.name}")
        return CompletedProcess((), 0, "\n".join(rows) + "\n", "")

    def scancel(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        if self.chance(0.2):
            return CompletedProcess((), 1, "", "scancel: error: Unable to contact slurm controller\n")
        if self.chance(1.0 if self.is_deaf else 0.1):
            self.counted["scancel without effect"] += 1
            return CompletedProcess((), 0, "", "")
        for job in self.jobs:
            array_id, is_task, _ = job.job_id.partition("_")
            if {job.job_id, array_id} & set(argv) and job.state not in FINAL and not job.is_forgotten:
                if is_task and job.state == "PENDING":  # it vanishes; the array stays, under its bare id
                    job.is_forgotten, self.bare_arrays[array_id] = True, job.name
                job.state, job.ended_at = "CANCELLED", self.now
        assert "7" not in argv, "it cancels somebody else's job"
        return CompletedProcess((), 0, "", "")

    def scontrol(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        return CompletedProcess((), 0, "MaxArraySize = 1001\n", "")

    def sinfo(self, argv: tuple[str, ...]) -> CompletedProcess[str]:
        return CompletedProcess((), 0, "n1|idle|none\nn2|idle|none\n", "")


take_claim_on_node = take_claim


def _indices(text: str) -> list[int | None]:
    found: list[int | None] = []
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


class Silent:
    """An observer."""

    def saw(self, run: RunPlan, status: Any) -> None:
        """Nothing."""

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        """Nothing."""

    def stopping(self) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        """Nothing."""


def judge(run: RunPlan, entry: JournalEntry) -> Judgement:
    """Judge by the job's end alone."""
    assert entry.last is not None
    assert entry.last.status is not None
    status = entry.last.status
    is_success = status.job_class is JobClass.SUCCEEDED
    is_infrastructure = status.job_class is JobClass.INFRASTRUCTURE
    verdict = "success" if is_success else "failed"
    return Judgement(verdict, () if is_success else (status.state,), is_success, status.state, is_infrastructure)


def plan_of(num_singles: int, num_tasks: int) -> ScenarioPlan:
    singles = [planned_run(f"s{i}", ranks_per_node=1) for i in range(num_singles)]
    tasks = [planned_run("a", i, ranks_per_node=1, array="arrays/0", array_index=i) for i in range(num_tasks)]
    return ScenarioPlan("s", "c", (*singles, *tasks), (), runner=RUNNER)


@contextmanager
def driver_dies_at_writes(world: World) -> Iterator[None]:
    """Let the driver die before and after whatever it writes."""

    def mortal(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            world.may_die(f"before {name}")
            answer = function(*args, **kwargs)
            world.may_die(f"after {name}")
            return answer

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "_event", mortal(Journal._event, "an event"))
        for name in ("intend", "submitted", "saw", "ending", "decided", "forget"):
            patch.setattr(Journal, name, mortal(getattr(Journal, name), f"journal.{name}"))
        log = SubmissionLog
        patch.setattr(log, "_append", mortal(log._append, "a line of the log"))
        patch.setattr(submitter, "put_aside", mortal(submitter.put_aside, "put_aside"))
        patch.setattr(context, "take_claim", mortal(context.take_claim, "take_claim"))
        patch.setattr(client, "run_command", world.run)
        patch.setattr(time, "monotonic", world.clock)
        patch.setattr(time, "sleep", world.sleep)
        patch.setattr(random, "uniform", world.rng.uniform)
        patch.setattr(Progress.__init__, "__defaults__", (world.clock,))
        yield


def drive(world: World, plan: ScenarioPlan, *, only_cancel: bool = False) -> bool:
    """Drive the plan as one process would; return whether it came to an end by itself."""
    try:
        pace = Pace(1.0, 10.0, world.clock)
        run_all(plan, world.root, SlurmClient(SYSTEM), Silent(), judge, pace=pace, only_cancel=only_cancel)
    except Died:
        if world.chance(0.1):
            world.counted["journal lost"] += 1
            for path in world.root.glob("journal.sqlite*"):
                path.unlink()
        return False
    except MBridgeError as error:
        world.counted[type(error).__name__] += 1
        return only_cancel and isinstance(error, Interrupted) and not error.left_running
    return True


def play(root: Path, seed: int) -> World:
    """Drive a plan to its end, through as many deaths as there are, and let everything come to rest."""
    rng = random.Random(seed)
    plan = plan_of(rng.randint(0, 4), rng.choice((0, 2, 5)))
    world = World(root, rng, [run.key for run in plan.runs], deaths_left=rng.choice((0, 1, 3, 8)))
    world.faults_until = rng.choice((1100.0, 1300.0, 2000.0))
    world.is_deaf = rng.random() < 0.3
    for run in plan.runs:
        (root / run.key).mkdir(parents=True)
        if run.array:
            (root / run.array).mkdir(parents=True, exist_ok=True)
            (root / run.array / str(run.array_index)).symlink_to(root / run.key)
    is_cancelled = rng.random() < 0.3
    with driver_dies_at_writes(world):
        for attempt in range(100):
            if is_cancelled and attempt > 0 and drive(world, plan, only_cancel=True):
                break
            if drive(world, plan) and not is_cancelled:
                break
            world.sleep(rng.uniform(0, 30))
        else:
            raise AssertionError("it never comes to an end")
        if is_cancelled:
            check_nothing_runs(world)
        for _ in range(300):
            world.sleep(5.0)
    check(world, plan, is_cancelled)
    return world


def entries(root: Path) -> dict[str, JournalEntry]:
    journal = Journal(root / "journal.sqlite")
    try:
        return journal.entries()
    finally:
        journal.close()


def check_nothing_runs(world: World) -> None:
    """Check what a cancel leaves: nothing that Slurm knows of runs."""
    running = [job.job_id for job in world.jobs if job.state == "RUNNING" and not job.is_forgotten]
    assert not running, f"still running after cancel: {running}"


def check(world: World, plan: ScenarioPlan, is_cancelled: bool) -> None:
    """Check the promises."""
    known = entries(world.root)
    log = SubmissionLog(world.root).read()
    looked_for = {attempt.token for attempt in log if attempt.is_doubtful}
    for run in plan.runs:
        entry = known[run.key]
        ids = [attempt.job_id for attempt in entry.attempts]
        own = [job for job in world.jobs if (job.directory.resolve().relative_to(world.root)).as_posix() == run.key]
        trained = [job.job_id for job in own if job.has_trained]
        begun = [job.job_id for job in own if job.started_at]
        assert len(trained) <= 1, f"{run.key}: trained twice: {trained}"
        assert set(begun) <= set(ids), f"{run.key}: nobody has seen {set(begun) - set(ids)}"
        followed = {attempt.token for attempt in entry.attempts if attempt.job_id} | looked_for
        unseen = [job.job_id for job in own if job.token not in followed]
        assert not unseen, f"{run.key}: nobody looks for {unseen}"
        assert not [job.job_id for job in own if job.state not in FINAL], f"{run.key}: still there"
        if entry.verdict == "success":
            assert trained == [ids[-1]], f"{run.key}: success of {ids}, trained {trained}"
        elif not is_cancelled:
            assert entry.verdict is not None, f"{run.key}: no verdict"
            # Not promised: a job that Slurm has forgotten for longer than unknown_s, and then knows again
            listed = [job for job in own if not job.is_forgotten and job.forgotten_s <= RUNNER.unknown_s]
            lost = [job.job_id for job in listed if job.has_trained]
            assert not lost, f"{run.key}: {entry.verdict} ({entry.reasons}), though {lost} trained to the end"


# The journal is lost, and again while it is restored; Slurm forgets a job for longer than unknown_s, and lists it again
@pytest.mark.parametrize("seed", [202494, 101579])
def test_games_that_once_broke_a_promise(tmp_path: Path, seed: int) -> None:
    play(tmp_path.resolve(), seed)


def violated(tmp: Path, seeds: range) -> str:
    """Return what the first game that breaks a promise says, "" if none does."""
    for seed in seeds:
        root = tmp / f"game-{seed}"
        root.mkdir(parents=True)
        try:
            play(root.resolve(), seed)
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return ""


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_the_promises_hold(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    play(tmp_path_factory.mktemp("game").resolve(), seed)


def test_a_thousand_steps_and_every_fault(tmp_path: Path) -> None:
    counted: Counter[str] = Counter()
    steps = seed = 0
    while seed < 40 or (missing := {kind for kind in SBATCH if not counted[f"sbatch: {kind}"]}):
        assert seed < 200, missing
        (root := tmp_path / str(seed)).mkdir()
        world = play(root.resolve(), seed)
        counted += world.counted
        steps, seed = steps + world.steps, seed + 1
    assert steps > 1000
    assert sum(count for what, count in counted.items() if what.startswith("died")) > 10


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps(tmp_path: Path, figure: Figure) -> None:
    counted: Counter[str] = Counter()
    steps, seed = 0, 0
    while steps < 100_000 or seed < 500:
        (root := tmp_path / str(seed)).mkdir()
        world = play(root.resolve(), seed)
        counted += world.counted
        steps, seed = steps + world.steps, seed + 1
    figure(f"{steps} steps, seeds 0 to {seed - 1}")
    figure("\n".join(f"{count:6} {what}" for what, count in sorted(counted.items())))


# The defects that this test was written for, planted again


def _every_error_is_a_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jobs, "_proves_refusal", lambda *_: True)


def _ids_are_believed(patch: pytest.MonkeyPatch) -> None:
    def of(self: Any, job: Any) -> list[Any]:
        return [self._rows[job.job_id]] if job.job_id in self._rows else []

    patch.setattr(client.Listing, "of", of)
    patch.setattr(client, "claimed_by", lambda *_: None)


def _nothing_is_claimed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(context, "take_claim", lambda *_: None)
    patch.setitem(globals(), "take_claim_on_node", lambda directory, token, job_id: job_id)


@pytest.mark.parametrize("plant", [_every_error_is_a_refusal, _ids_are_believed, _nothing_is_claimed])
def test_a_planted_defect_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)
    assert violated(tmp_path, range(200))
