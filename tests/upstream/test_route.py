"""Runs of both launchers under one scheduler: each goes where it belongs, and nobody hears of the other's."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.megatron_bridge import ByLauncher
from tests.runs import planned_run

ROOT = Path("/root")


class FakeScheduler:
    """A scheduler whose ids have a prefix, and that refuses what is not its own."""

    def __init__(self, name: str, prefix: str) -> None:
        self.name, self.prefix = name, prefix
        self.calls: list[str] = []

    def preflight(self) -> None:
        self.calls.append("preflight")

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        self._check(run.test_id for run in runs)
        return [tuple(runs)] if runs else []

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        self._check(run.test_id for run in submission.runs)
        return {run.key: f"{self.prefix}{i}" for i, run in enumerate(submission.runs)}

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        every = list(submissions)
        assert every
        self._check(run.test_id for each in every for run in each.runs)
        return {run.key: f"{self.prefix}7" for each in every for run in each.runs}

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        assert jobs
        self._check(job.directory.name for job in jobs)
        return {job.key: Seen(job.job_id, JobStatus(self.name, JobClass.ACTIVE)) for job in jobs}

    def cancel(self, jobs: Iterable[Job]) -> None:
        self.calls.append(f"cancel {' '.join(job.job_id for job in jobs)}")

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        return {nodes: self.name}

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        return len(list(exclude))

    def _check(self, tests: Iterable[str]) -> None:
        assert set(tests) <= {self.name}


def _run(test_id: str, point: int = 0) -> RunPlan:
    return planned_run(test_id, key=f"{test_id}/{point}", upstream=object() if test_id == "upstream" else None)


@pytest.fixture
def homes() -> tuple[FakeScheduler, FakeScheduler]:
    return FakeScheduler("embedded", ""), FakeScheduler("upstream", "launcher-")


def test_each_run_goes_home(homes: Any) -> None:
    both = ByLauncher(*homes)
    runs = [_run("upstream"), _run("embedded"), _run("embedded", 1), _run("upstream", 1)]
    batches = both.batches(runs)
    assert sorted(run.key for batch in batches for run in batch) == sorted(run.key for run in runs)
    submissions = [Submission(str(i), batch) for i, batch in enumerate(batches)]
    ids = {key: job_id for each in submissions for key, job_id in both.submit(each, ROOT).items()}
    assert ids == {"embedded/0": "0", "embedded/1": "1", "upstream/0": "launcher-0", "upstream/1": "launcher-1"}
    assert both.find(submissions, ROOT) == {key: f"{job_id[:-1]}7" for key, job_id in ids.items()}


def test_each_job_is_asked_for_at_home(homes: Any) -> None:
    both = ByLauncher(*homes)
    homes_of = {"17": "embedded", "launcher-5.cafe": "upstream", "18_3": "embedded"}
    jobs = [Job(f"key {job_id}", job_id, "cafe", Path("/", home)) for job_id, home in homes_of.items()]
    seen = both.poll(jobs)
    assert {job.job_id: seen[job.key].status.state for job in jobs} == homes_of
    both.cancel(iter(jobs))
    assert [home.calls for home in homes] == [["cancel 17 18_3"], ["cancel launcher-5.cafe"]]


def test_nobody_is_asked_for_nothing(homes: Any) -> None:
    both = ByLauncher(*homes)
    assert (both.poll([]), both.find([], ROOT), both.batches([])) == ({}, {}, [])
    both.cancel([])
    assert [home.calls for home in homes] == [[], []]
    assert set(both.poll([Job("a", "17", "cafe", Path("/embedded"))])) == {"a"}


def test_both_are_checked_and_have_the_same_nodes(homes: Any) -> None:
    both = ByLauncher(*homes)
    both.preflight()
    assert [home.calls for home in homes] == [["preflight"], ["preflight"]]
    assert both.unhealthy_nodes("n1") == {"n1": "embedded"}
    assert both.num_usable_nodes(["n1", "n2"]) == 2
