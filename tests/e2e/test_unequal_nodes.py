"""Nodes with different numbers of CPUs: a job's step takes what every node has."""

from typing import Any

import pytest

from tests.sandbox import conf

pytestmark = pytest.mark.slurm


def test_the_smallest_node_decides(
    new_cluster: Any, start_run: Any, stand_in_test: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = conf.render_slurm_conf

    def unequal(*args: Any) -> str:
        return same(*args).replace("NodeName=gb200-2 ", "NodeName=gb200-2 CPUs=4 ")

    monkeypatch.setattr(conf, "render_slurm_conf", unequal)
    sandbox = new_cluster(nodes=2)
    assert sandbox.run("sinfo", "--noheader", "--Node", "--format=%c").stdout.split() == ["8", "4"]
    test = stand_in_test("wide", num_nodes=2, num_gpus=8)
    run = start_run(sandbox, [test], system='extra_sbatch_args = ["--exclusive"]').finish(0)
    assert run.point("wide")["verdict"] == "success"
