"""Twelve points in the real CloudAI, trained: a file of its own, since tests of a file run one after the other."""

import json
import tomllib
from typing import Any

import pytest
from cloudai.systems.slurm import SlurmJobMetadata

from tests.interop.test_cloudai import CACHED, point, registered, status_of, trajectory_of

TWELVE = "gb = [2, 4, 6]\nmb = [1, 2]\nseq_length = [32, 64]"
__all__ = ["registered"]


@pytest.mark.slurm
def test_twelve_points_train(cluster_place: Any) -> None:
    """A sweep of twelve points with the real training program, and every report that CloudAI registers by default."""
    del cluster_place.env["MBRIDGE_PYTHON"]
    cluster_place.write(TWELVE)
    ended = cluster_place.run("run", CACHED)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert status_of(ended) == {"PASSED": 12, "FAILED": 0}
    assert "WARNING" not in ended.stdout

    rows = trajectory_of(cluster_place)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        directory = point(cluster_place, row["step"])
        (ours,) = json.loads((directory / "report.json").read_text())["points"]
        assert ours["verdict"] == "success"
        assert row["observation"] == [pytest.approx(ours["metrics"]["step_time_s"]["capped_mean"])]
        job = SlurmJobMetadata.model_validate(tomllib.loads((directory / "slurm-job.toml").read_text()))
        assert (job.state, job.srun_cmd.split()[0]) == ("COMPLETED", "srun")
        assert list((directory / "metadata").glob("node-*.toml"))
    best = max(rows, key=lambda row: float(row["reward"]))
    kept = tomllib.loads((cluster_place.results / "points/0/points.toml").read_text())
    assert kept["cmd_args"].items() >= best["action"].items()
    assert "gb200-" in (cluster_place.results / "scenario.html").read_text()  # the nodes
    assert (cluster_place.results / "scenario-dse-report.html").is_file()
    assert not cluster_place.results.with_name(cluster_place.results.name + ".tgz").exists()
