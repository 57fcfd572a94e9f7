"""What the client of the upstream launcher believes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus, Seen, Submission
from cloudai_mbridge.schedulers.local import Child, LocalClient
from cloudai_mbridge.schedulers.megatron_bridge import ByLauncher, UpstreamClient
from cloudai_mbridge.schedulers.slurm import SlurmClient
from tests.runs import planned_run, slurm_system

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"
NO_PLAN: Any = object()  # of an upstream run; a scheduler only asks whether there is one


@pytest.fixture
def run(tmp_path: Path) -> RunPlan:
    (tmp_path / "a/0/0").mkdir(parents=True)
    return planned_run()


@pytest.fixture
def client(run: RunPlan) -> UpstreamClient:
    return UpstreamClient(slurm_system(), [run])


def test_a_launcher_is_found_by_its_claim(client: UpstreamClient, run: RunPlan, tmp_path: Path) -> None:
    job_id = f"launcher-17.{TOKEN}"
    take_claim(tmp_path / run.key, TOKEN, job_id)
    assert client.find([Submission(TOKEN, (run,))], tmp_path) == {run.key: job_id}


def test_the_log_of_another_launcher_proves_nothing(client: UpstreamClient, run: RunPlan, tmp_path: Path) -> None:
    """Otherwise the launcher of the next attempt would be cancelled as a stray of the one that was given up."""
    (tmp_path / run.key / POINT_FILES.launcher_log).write_text("Job id: 12")
    take_claim(tmp_path / run.key, OTHER, f"launcher-18.{OTHER}")
    take_claim(tmp_path / run.key, TOKEN, None)
    assert client.find([Submission(TOKEN, (run,))], tmp_path) == {}


def test_a_launchers_job_waits_for_nodes_that_are_down(
    client: UpstreamClient, run: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives the same reason for more nodes than exist; the client adds the id of Slurm's job to it."""
    waiting = JobStatus("PENDING", JobClass.ACTIVE, reason="PartitionNodeLimit", hopeless=JobClass.FAILED)
    monkeypatch.setattr(SlurmClient, "poll", lambda self, jobs: {job.key: Seen(job.job_id, waiting) for job in jobs})
    monkeypatch.setattr(SlurmClient, "num_usable_nodes", lambda self, exclude: 2)
    (tmp_path / run.key / POINT_FILES.launcher_log).write_text("- Job id: 12\n")
    monkeypatch.setattr(Child, "poll", lambda self: None)
    job = Job(run.key, f"launcher-17.{TOKEN}", TOKEN, tmp_path / run.key)
    status = client.poll([job])[run.key].status
    assert (status.reason, status.hopeless) == ("Slurm job 12: PartitionNodeLimit", JobClass.FAILED)
    sizes = {nodes: client.may_start(replace(run, num_nodes=nodes), status) for nodes in (1, 2, 3)}
    assert sizes == {1: True, 2: True, 3: False}
    assert client.exceeded(replace(run, num_nodes=3), status) == "3 nodes"
    both = ByLauncher(LocalClient(LocalSystem(name="here", scheduler="local")), client)
    assert both.may_start(replace(run, upstream=NO_PLAN), status)
