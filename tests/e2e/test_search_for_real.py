"""A space of 72 points of a small model, trained for real: all of them, and a search, killed in the middle.

On this machine and on Slurm. At the end the winner and the best of all points are trained by turns, which also tells
how noisy such a step is: the winner must not be slower by more than that, and the search must have used a fifth of the
time at most. Run it with -s to see the figures.
"""

import math
import signal
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest
from scipy.special import stdtrit

from tests.figures import Figure

pytestmark = [pytest.mark.slurm, pytest.mark.drill, pytest.mark.timeout(3 * 3600)]
pytest.importorskip("torch")

SYSTEMS = {
    "local": 'name = "here"\nscheduler = "local"\nmonitor_interval = 0.3\n',
    "slurm": f"""name = "c"
scheduler = "slurm"
default_partition = "main"
monitor_interval = 0.3
gpus_per_node = 4
python_executable = "{sys.executable}"
[[partitions]]
name = "main"
""",
}
TEST = """
[[Tests]]
id = "{id}"
name = "{id}"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
time_limit = "00:20:00"
{agent}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_small"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 12
gb = 16
{args}
"""
SPACE: Mapping[str, list[int]] = {
    "mb": [1, 2, 4, 8],
    "tp": [1, 2],
    "pp": [1, 2],
    "cp": [1, 2],
    "vp": [1, 2, 4],
    "recompute_num_layers": [1, 2, 4],
}
POINTS, SHARE, PAIRS = 72, 5, 5
TRIALS = 12  # of other points; the two best are measured again if they are close


def render(id: str, args: Mapping[str, Any], agent: str = "") -> str:
    return TEST.format(id=id, agent=agent, args="\n".join(f"{name} = {value}" for name, value in args.items()))


def gpu_hours(run: Any) -> float:
    """Return what the jobs of all points have used."""
    used = (
        point["world_size"] * attempt["run_time_s"] for point in run.report["points"] for attempt in point["attempts"]
    )
    return sum(used) / 3600


def step_time_s(point: Mapping[str, Any]) -> float:
    return float(point["metrics"]["step_time_s"]["median"])


@pytest.fixture(params=["local", "slurm"])
def start(request: pytest.FixtureRequest, start_run: Any) -> Any:
    """Start runs of tests, one point at a time."""
    sandbox = request.getfixturevalue("cluster") if request.param == "slurm" else None
    return lambda *tests: start_run(sandbox, tests, runner="max_parallel = 1", whole_system=SYSTEMS[request.param])


def test_the_winner_is_the_best_of_all(start: Any, until: Any, figure: Figure) -> None:
    grid = start(render("all", SPACE)).finish(0, 7200)
    points = {point["label"]: point for point in grid.report["points"] if point["verdict"] == "success"}
    assert len(points) == POINTS
    searched = start(render("all", SPACE, f'agent = "tune"\nagent_steps = {TRIALS}'))
    until("two points are measured", lambda: len(searched.query("SELECT 1 FROM attempts WHERE ended_at NOT NULL")) > 1)
    searched.send(signal.SIGKILL)
    searched.process.wait()
    searched.resume().finish(0, 7200)
    (search,) = searched.report["searches"]
    started = list(searched.root.glob("all/*/*/started.txt"))
    assert len(started) == sum(trial["runs"] for trial in search["trials"])
    assert {path: len(path.read_text().splitlines()) for path in started} == dict.fromkeys(started, 1)
    best, winner = min(points, key=lambda label: step_time_s(points[label])), search["best"]
    pair = {"winner": points[winner]["coordinates"], "best": points[best]["coordinates"]}
    again = start(*(render(f"{name}{n}", args) for n in range(PAIRS) for name, args in pair.items())).finish(0, 3600)
    logs = {name: [math.log(step_time_s(again.point(f"{name}{n}"))) for n in range(PAIRS)] for name in pair}
    squares = sum((log - fmean(own)) ** 2 for own in logs.values() for log in own)
    noise = math.sqrt(squares / (2 * PAIRS - 2))
    slower = fmean(logs["winner"]) - fmean(logs["best"])
    share = search["gpu_hours"] / gpu_hours(grid)
    figure(f"best of {POINTS}: {best}; the search's: {winner}, {slower:+.1%}, with noise of {noise:.1%}")
    figure(f"{len(search['trials'])} trials, {share:.0%} of the grid's GPU time; {search['ending']}")
    assert slower <= stdtrit(2 * PAIRS - 2, 0.95) * noise * math.sqrt(2 / PAIRS)
    assert share <= 1 / SHARE
