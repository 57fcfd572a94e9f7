"""Scripts on this machine, which outlive the mbridge that started them. The processes are real."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cloudai_mbridge.launch.script import EPILOGUE, LOCAL_START
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.schedulers.interface import Job, JobClass, Submission
from cloudai_mbridge.schedulers.local import LocalClient
from tests.runs import planned_run

pytestmark = pytest.mark.process

SYSTEM = LocalSystem(name="l", scheduler="local")
START, END = ("\n".join(lines) + "\n" for lines in (LOCAL_START, EPILOGUE))
# A rank as torchrun starts it: in a session of its own
RANK = "setsid sleep 1000 & echo $! > rank.txt; wait\n"


class Started:
    """A script that a client has started."""

    def __init__(self, root: Path, body: str, **keys: Any) -> None:
        self.root, self.run = root, planned_run(**keys)
        self.directory = root / self.run.key
        self.directory.mkdir(parents=True)
        (self.directory / "run.sh").write_text(START + body + END)
        self.token = f"{time.time_ns():016x}"
        self.submission = Submission(self.token, (self.run,))
        self.client = LocalClient(SYSTEM, [self.run])
        self.job_id = self.client.submit(self.submission, root)[self.run.key]

    @property
    def job(self) -> Job:
        return Job(self.run.key, self.job_id, self.token, self.directory)

    def poll(self, client: LocalClient | None = None) -> Any:
        return (client or self.client).poll([self.job])[self.run.key].status

    def ended(self, client: LocalClient | None = None) -> Any:
        """Wait for the end."""
        for _ in range(500):
            if (status := self.poll(client)).is_final:
                return status
            time.sleep(0.02)
        raise AssertionError("it does not end")

    def wait_for(self, name: str) -> str:
        for _ in range(500):
            if (path := self.directory / name).exists() and (text := path.read_text()):
                return text
            time.sleep(0.02)
        raise AssertionError(f"{name} does not come")

    def later(self) -> LocalClient:
        """Return the client of a later process."""
        return LocalClient(SYSTEM, [self.run])


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    every: list[Started] = []

    def start(body: str, **keys: Any) -> Started:
        every.append(Started(tmp_path, body, **keys))
        return every[-1]

    yield start
    for each in every:
        each.poll()
        each.client.cancel([each.job])


@pytest.mark.parametrize(("body", "state", "code"), [("true\n", "COMPLETED", 0), ("(exit 3)\n", "FAILED", 3)])
def test_a_script_that_ends(started: Any, body: str, state: str, code: int) -> None:
    job = started(body)
    status = job.ended()
    assert (status.state, status.exit_code) == (state, code)
    assert status.run_time_s is not None


def test_a_later_client_finds_what_runs(started: Any) -> None:
    job = started(RANK)
    job.wait_for("rank.txt")
    later = job.later()
    assert later.find([job.submission, Submission("another", (planned_run(key="b/0/0"),))], job.root) == {
        "a/0/0": job.job_id
    }
    assert job.poll(later).state == "RUNNING"


@pytest.mark.parametrize(("body", "state", "code"), [("true\n", "COMPLETED", 0), ("(exit 3)\n", "FAILED", 3)])
def test_a_later_client_finds_what_has_ended(started: Any, body: str, state: str, code: int) -> None:
    job = started(body)
    job.ended()
    later = job.later()
    assert later.find([job.submission], job.root) == {"a/0/0": job.job_id}
    status = job.poll(later)
    assert (status.state, status.exit_code) == (state, code)
    for claim in (job.root / job.submission.runs[0].key).glob("claim.*"):
        claim.unlink()  # as in a copy without links
    assert job.later().find([job.submission], job.root) == {"a/0/0": job.job_id}


def test_a_later_client_sees_that_it_was_killed(started: Any) -> None:
    job = started(RANK)
    rank = int(job.wait_for("rank.txt"))
    psutil.Process(int(job.job_id.partition(".")[0])).kill()
    job.ended()
    status = job.ended(job.later())
    assert (status.job_class, status.signal) == (JobClass.FAILED, 9)
    assert not _is_alive(rank)


def test_what_was_never_started_is_not_found(started: Any, tmp_path: Path) -> None:
    assert LocalClient(SYSTEM).find([Submission("nobody", (planned_run(),))], tmp_path) == {}


def test_a_cancelled_script_leaves_no_rank_behind(started: Any) -> None:
    job = started(RANK)
    rank = int(job.wait_for("rank.txt"))
    job.client.cancel([job.job])
    assert (job.poll().state, job.poll().job_class) == ("CANCELLED", JobClass.CANCELLED)
    assert not _is_alive(rank)
    job.client.cancel([job.job])  # to cancel what has ended is not an error


def test_a_later_client_cancels_what_it_has_looked_at(started: Any) -> None:
    job = started(RANK)
    rank = int(job.wait_for("rank.txt"))
    later = job.later()
    job.poll(later)
    later.cancel([job.job])
    assert job.ended(later).state == "CANCELLED"
    assert not _is_alive(rank)


def test_a_later_client_cancels_what_it_has_not_looked_at(started: Any) -> None:
    """As `mbridge cancel` does in a directory that nobody drives."""
    job = started(RANK)
    rank = int(job.wait_for("rank.txt"))
    job.later().cancel([job.job])
    assert not _is_alive(rank)


def test_a_time_limit_holds_over_processes(started: Any) -> None:
    job = started(RANK, time_limit_s=0.3)
    rank = int(job.wait_for("rank.txt"))
    status = job.ended(job.later())
    assert (status.state, status.job_class) == ("TIMEOUT", JobClass.FAILED)
    assert not _is_alive(rank)


def test_a_clock_that_is_set_ends_nothing(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, the time limit seemed to be over; back, the run time was negative, which no journal takes."""
    job = started(RANK, time_limit_s=3600.0)
    rank = int(job.wait_for("rank.txt"))
    wall = time.time
    for offset_s in (7200.0, -7200.0):
        monkeypatch.setattr(time, "time", lambda offset_s=offset_s: wall() + offset_s)
        status = job.poll()
        assert (status.state, 0 <= status.run_time_s < 3600) == ("RUNNING", True)
    assert _is_alive(rank)


def test_a_file_servers_clock_is_compared_with_itself(started: Any) -> None:
    job = started("true\n")
    job.ended()
    for name, ahead_s in (("started.txt", 60), ("exit_code.txt", 67)):
        stamp = time.time() + ahead_s
        os.utime(job.directory / name, (stamp, stamp))
    assert job.poll(job.later()).run_time_s == pytest.approx(7, abs=1)
    os.utime(job.directory / "exit_code.txt", (0, 0))
    assert 0 <= job.poll(job.later()).run_time_s < 60


@pytest.mark.parametrize(("begun_in", "cancelled_in"), [("5", ""), ("", "5"), ("5", "6")])
def test_ranks_are_cancelled_from_any_allocation(
    started: Any, monkeypatch: pytest.MonkeyPatch, begun_in: str, cancelled_in: str
) -> None:
    """A run that was started inside salloc, and is cancelled from another shell of the node."""
    for job_id, is_start in ((begun_in, True), (cancelled_in, False)):
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        if job_id:
            monkeypatch.setenv("SLURM_JOB_ID", job_id)
        if is_start:
            job = started(RANK)
            rank = int(job.wait_for("rank.txt"))
    job.later().cancel([job.job])
    assert not _is_alive(rank)


def test_there_is_one_node() -> None:
    client = LocalClient(SYSTEM)
    assert (client.num_usable_nodes(()), client.num_usable_nodes(("localhost",))) == (1, 0)
    assert client.unhealthy_nodes("localhost") == {}
    assert [len(batch) for batch in client.batches([planned_run(), planned_run()])] == [1, 1]
