"""What CloudAI's scenarios have, on a real cluster: hooks, nsys, node groups, srun arguments and durations."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

# It writes its arguments down and starts the program, as nsys does; %h is the host's name to nsys.
NSYS = """#!/bin/bash
printf '%s\\n' "$@" > "nsys-argv.$SLURM_NODEID"
while [[ $1 != *.py ]]; do shift; done
exec "$@"
"""
HOOK = 'name = "warm_up"\n[[Tests]]\nid = "one"\ntest_name = "check"\n'
GROUPS = '[[partitions.groups]]\nname = "pair"\nnodes = ["gb200-[1-2]"]\n'


@pytest.fixture(scope="module")
def pair(new_cluster: Callable[..., Any]) -> Any:
    return new_cluster(nodes=2)


@pytest.fixture
def hook_dir(tmp_path: Path, stand_in_test: Any) -> Callable[..., str]:
    """Write a hook whose test does as told, and return the option that names its directory."""

    def write(**told: Any) -> str:
        (tmp_path / "test").mkdir()
        (tmp_path / "warm_up.toml").write_text(HOOK)
        table = stand_in_test("check", told).replace("[[Tests]]", "").replace("[Tests.", "[")
        lines = [line for line in table.splitlines() if not line.startswith(("id =", "num_nodes ="))]
        (tmp_path / "test" / "check.toml").write_text("\n".join(lines))
        return f"--hook-dir={tmp_path}"

    return write


def test_a_hook_that_succeeds_comes_first(pair: Any, start_run: Any, stand_in_test: Any, hook_dir: Any) -> None:
    both = 'pre_test = "warm_up"\npost_test = "warm_up"'
    run = start_run(pair, [stand_in_test("a")], scenario=both, args=[hook_dir()]).finish(0)
    points = {point["test_id"]: point["job"] for point in run.report["points"]}
    assert list(points) == ["pre_test.one", "a", "post_test.one"]
    assert points["pre_test.one"]["ended_at"] <= points["a"]["submitted_at"]
    assert points["a"]["ended_at"] <= points["post_test.one"]["submitted_at"]


def test_a_hook_that_fails_stops_everything(pair: Any, start_run: Any, stand_in_test: Any, hook_dir: Any) -> None:
    tests = [stand_in_test("a"), stand_in_test("b")]
    run = start_run(pair, tests, scenario='pre_test = "warm_up"', args=[hook_dir(exit=1)]).finish(1)
    verdicts = {point["test_id"]: point["verdict"] for point in run.report["points"]}
    assert verdicts == {"pre_test.one": "failed", "a": "skipped", "b": "skipped"}
    assert "the pre_test hook pre_test.one/single/0 failed" in run.words


def test_the_rest_acts(pair: Any, start_run: Any, stand_in_test: Any, tmp_path: Path) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text(NSYS)
    nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)
    keys = 'nodes = ["main:pair:2"]\ntime_limit = "10m"\nextra_srun_args = "--comment \'two words\'"\n'
    table = f'[Tests.nsys]\nnsys_binary = "{nsys}"\ntrace = "cuda,nvtx"\nextra_args = ["--stats=false"]\n'
    test = stand_in_test("a", num_nodes=2, run=keys) + table
    system = f"""name = "c"
scheduler = "slurm"
default_partition = "main"
gpus_per_node = 4
monitor_interval = 0.3
python_executable = "{Path(__file__).parents[1] / "stand_in" / "training.py"}"
[[partitions]]
name = "main"
{GROUPS}"""
    run = start_run(pair, [test], whole_system=system).finish(0)
    directory = run.root / "a" / "single" / "0"
    script = (directory / "job.sbatch").read_text()
    assert "#SBATCH --time=00:10:00" in script
    assert "#SBATCH --nodelist=gb200-1,gb200-2" in script
    assert "--comment 'two words'" in script
    for node in (0, 1):
        words = (directory / f"nsys-argv.{node}").read_text().splitlines()
        assert words[:6] == ["profile", "-o", "nsys-%h", "-t", "cuda,nvtx", "--stats=false"]
        assert "torch.distributed.run" in words
    plan = json.loads((run.root / "plan.json").read_text())
    assert plan["runs"][0]["extra_srun_args"] == "--comment 'two words'"
