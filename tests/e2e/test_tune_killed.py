"""A search on Slurm whose driver is killed twice goes on with what it has learned, and doubles nothing."""

import json
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

SEARCH = """
[[Tests]]
id = "search"
name = "search"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
time_limit = "00:10:00"
agent = "tune"
agent_steps = 7
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 20
mb = [1, 2, 4]
gb = 4
[Tests.extra_env_vars]
STAND_IN = [{points}]
"""
TIMES = (1.0, 0.7, 1.3, 0.4, 1.9)


def num_ended(run: Any) -> int:
    ((number,),) = run.query("SELECT count(*) FROM attempts WHERE ended_at IS NOT NULL") or [(0,)]
    return int(number)


def test_a_killed_search_goes_on(cluster: Any, start_run: Any, until: Any) -> None:
    points = ", ".join(f"'{json.dumps({'step_s': 0.05, 'says_s': seconds})}'" for seconds in TIMES)
    run = start_run(cluster, [SEARCH.format(points=points)], runner="max_parallel = 2")
    for ended in (2, 4):
        until(f"{ended} trials", lambda ended=ended: num_ended(run) >= ended or run.process.poll() is not None)
        assert run.process.poll() is None, run.read_output()
        run.send(signal.SIGKILL)
        run.process.wait()
        run.resume()
    run.finish(0)
    (search,) = run.report["searches"]
    trials = {trial["label"]: trial for trial in search["trials"]}
    assert 5 <= len(trials) == len(search["trials"]) <= 7
    assert trials[search["best"]]["step_time_s"] == min(trial["step_time_s"] for trial in trials.values())
    for key, point in run.points().items():
        started = (run.root / key / "started.txt").read_text().splitlines()
        assert (len(started), len(point["attempts"])) == (1, 1), key
    assert {point["label"] for point in run.report["points"]} == trials.keys()
