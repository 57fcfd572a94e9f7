"""A test with agent = "tune", run on this machine: few of its points are tried, and killed in the middle it goes on."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from tests.benchmarks.replay.case import read_cases
from tests.golden import Sentence

SYSTEM = 'name = "here"\nscheduler = "local"\noutput_path = "{out}"\npython_executable = "{stand_in}"\n'
SCENARIO = """name = "search"
[[Tests]]
id = "layouts"
name = "layouts"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
agent = "tune"
agent_steps = {steps}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 5
gb = 8
mb = [1, 2, 4, 8]
seq_length = [64, 128, 256]
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str | Path]:
    stand_in = Path(__file__).parents[1] / "stand_in" / "training.py"
    (tmp_path / "system.toml").write_text(SYSTEM.format(out=tmp_path / "out", stand_in=stand_in))
    return ["--system-config", tmp_path / "system.toml", "--test-scenario", tmp_path / "scenario.toml"]


def report_in(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = (tmp_path / "out").glob("*/report.json")
    return path.parent, json.loads(path.read_text())


def test_a_search_tries_few_points_and_says_what_it_found(files: Any, tmp_path: Path, mbridge: Any) -> None:
    (tmp_path / "scenario.toml").write_text(SCENARIO.format(steps=2))
    done = mbridge("run", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    root, report = report_in(tmp_path)
    (search,) = report["searches"]
    tried = [trial["label"] for trial in search["trials"]]
    assert (search["test_id"], search["points"], len(tried)) == ("layouts", 12, 2)
    assert report["summary"]["success"] == len(report["points"]) in (2, 4), "the two best may be measured again"
    assert search["best"] in tried
    assert "agent" not in (root / search["best_definition"]).read_text()
    assert search["ending"].startswith("agent_steps = 2 allows no more; with probability ")
    assert "searched: 2 of 12 points tried" in done.stdout
    again = mbridge("resume", root)
    assert again.returncode == 0, again.stdout + again.stderr
    _, same = report_in(tmp_path)
    assert same["searches"] == report["searches"]


def test_an_unknown_agent_and_a_search_without_trials(
    files: Any, tmp_path: Path, mbridge: Any, sentence: Sentence
) -> None:
    (tmp_path / "scenario.toml").write_text(SCENARIO.format(steps=0))
    done = mbridge("run", *files)
    assert done.returncode == 2
    assert "agent_steps" in done.stderr
    sentence(done.stderr)
    (tmp_path / "scenario.toml").write_text(SCENARIO.format(steps=3).replace('"tune"', '"tuna"'))
    sentence(mbridge("run", *files).stderr)


GRID = """name = "grid"
[[Tests]]
id = "layouts"
name = "layouts"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 5
[Tests.extra_env_vars]
STAND_IN = [{points}]
"""


def test_a_grid_that_was_run_is_replayed(files: Any, tmp_path: Path, mbridge: Any) -> None:
    told = [
        {"says_s": 0.3},
        {"says_s": 0.1},
        {"says_s": 0.2},
        {"say": "CUDA out of memory. Tried to allocate", "exit": 1},
    ]
    points = ", ".join(f"'{json.dumps(each)}'" for each in [*told, {"exit": 7}])
    (tmp_path / "scenario.toml").write_text(GRID.format(points=points))
    assert mbridge("run", *files).returncode == 1
    root, _ = report_in(tmp_path)
    (case,) = read_cases(root, None)
    assert (case.name, len(case.times), case.best_s) == ("grid: layouts", 4, 0.1)
    with pytest.raises(BadInput):
        read_cases(tmp_path, None)


EARLY = """name = "early"
[[Tests]]
id = "layouts"
name = "layouts"
description = "d"
test_template_name = "MegatronBridge"
num_nodes = 1
agent = "tune"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 40
[Tests.extra_env_vars]
STAND_IN = ['{{"says_s": 0.1}}', '{{"says_s": 0.2, "at": 30, "wait_for": "{never}"}}']
"""


def test_a_trial_that_cannot_win_is_ended_early(files: Any, tmp_path: Path, mbridge: Any) -> None:
    """The second point would never end by itself."""
    (tmp_path / "scenario.toml").write_text(EARLY.format(never=tmp_path / "never"))
    done = mbridge("run", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    root, report = report_in(tmp_path)
    (search,) = report["searches"]
    assert [trial["outcome"] for trial in search["trials"]] == ["measured", "ended early"]
    assert (search["trials"][1]["step_time_s"], search["best"]) == (0.2, search["trials"][0]["label"])
    slow = next(point for point in report["points"] if point["label"] != search["best"])
    assert (slow["verdict"], slow["job"]["state"]) == ("cancelled", "ENDED_EARLY")
    assert "it is slower than" in slow["reasons"][0]
    junit = ET.parse(root / "junit.xml").getroot()
    assert (junit.get("failures"), junit.get("errors"), junit.get("skipped")) == ("0", "0", "1")
