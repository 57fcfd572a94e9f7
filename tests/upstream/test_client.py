"""What the client of the upstream launcher believes."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import Submission
from cloudai_mbridge.schedulers.megatron_bridge import UpstreamClient

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def run(tmp_path: Path) -> RunPlan:
    (tmp_path / "a/0/0").mkdir(parents=True)
    data: dict[str, Any] = {
        **{"key": "a/0/0", "test_id": "a", "test_name": "t", "label": "0", "iteration": 0, "recipe": "r"},
        **{"num_nodes": 1, "ranks_per_node": 1, "num_steps": 1, "warmup_steps": 0},
        **{name: {} for name in ("coordinates", "args", "training_config", "definition", "env", "secret_env")},
    }
    return RunPlan(**data)


@pytest.fixture
def client(run: RunPlan) -> UpstreamClient:
    data = {"name": "c", "scheduler": "slurm", "default_partition": "main", "partitions": [{"name": "main"}]}
    return UpstreamClient(SlurmSystem.model_validate(data), [run])


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
