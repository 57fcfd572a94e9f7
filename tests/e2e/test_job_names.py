"""Sites that write around the names of jobs, or replace them: no job is lost, given up or trained twice.

The rewriting is done by Slurm itself, with a job_submit plug-in in Lua.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

PLUG_IN = """
function slurm_job_submit(job, partitions, uid)
  if job.name ~= nil then job.name = %s end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
REFUSES = """
function slurm_job_submit(job, partitions, uid)
  if job.name == nil or string.sub(job.name, 1, 12) ~= "project-sub:" then
    slurm.log_user("job names begin with project-sub:")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
RUNNER = "settle_s = 3\nunknown_s = 5\nretries = 3"


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=2)


def use_plug_in(sandbox: Any, text: str, until: Any) -> None:
    """Have the controller load a plug-in that replaces the one before."""
    conf = sandbox.directory / "slurm.conf"
    (sandbox.directory / "job_submit.lua").write_text(text)
    if "JobSubmitPlugins" not in conf.read_text():
        with conf.open("a") as file:
            file.write("JobSubmitPlugins=lua\n")
    sandbox.run("scontrol", "reconfigure")
    until("the plug-in", lambda: "lua" in sandbox.run("scontrol", "show", "config").stdout)


@pytest.mark.parametrize(
    "name",
    [
        '"project-sub:" .. job.name',
        'job.name .. "_gpu-4h.deadbeefdeadbeef"',
        '"p/" .. job.name .. ".site"',
        '"deadbeefdeadbeef"',
    ],
    ids=["prefix", "suffix with a hash", "both", "replaced by a hash"],
)
def test_every_point_is_trained_once(sandbox: Any, start_run: Any, stand_in_test: Any, until: Any, name: str) -> None:
    use_plug_in(sandbox, PLUG_IN % name, until)
    tests = [stand_in_test("one", {"step_s": 1.5}), stand_in_test("more", args="gb = 8\nmb = [1, 2, 4]")]
    run = start_run(sandbox, tests, runner=RUNNER).finish(0)
    points = run.points()
    assert len(points) == 4
    assert {point["verdict"] for point in points.values()} == {"success"}
    assert [key for key in points if _num_starts(run.root / key) != 1] == []


def test_a_site_may_want_a_prefix(sandbox: Any, start_run: Any, stand_in_test: Any, until: Any) -> None:
    use_plug_in(sandbox, REFUSES, until)
    refused = start_run(sandbox, [stand_in_test("one")], runner=RUNNER).finish(1)
    assert "project-sub" in refused.words
    run = start_run(sandbox, [stand_in_test("one")], runner=RUNNER, system='job_name_prefix = "project-sub:"').finish(0)
    assert run.point("one")["verdict"] == "success"
    names = sandbox.run("squeue", "--all", "--noheader", "--states=all", "--Format=Name:|").stdout
    assert f"project-sub:mbridge-{run.root.name}-one-" in names


def _num_starts(directory: Path) -> int:
    return len((directory / "started.txt").read_text().splitlines())
