"""Layouts from Python: ranked as the command ranks them, and measured by a search."""

import json
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from tests.api.conftest import STAND_IN
from tests.golden import Sentence


@pytest.mark.process
def test_ranked_as_by_the_command(mbridge: Any) -> None:
    layouts = mb.rank_layouts("llama3_70b", num_gpus=64, gpu="gb200", precisions=("fp8_cs",), top=5)
    done = mbridge(
        "tune",
        "--recipe",
        "llama3_70b",
        "--num-gpus",
        64,
        "--gpu",
        "gb200",
        "--precision",
        "fp8_cs",
        "--top",
        5,
        "--json",
    )
    best = json.loads(done.stdout)["best"]
    assert [layout.cmd_args for layout in layouts.best] == [layout["args"] for layout in best]
    for row, layout in zip(layouts.table.rows, best, strict=True):
        assert [row["step_time_low_s"], row["step_time_high_s"]] == layout["step_time_90_s"]
        same = ("rank", "step_time_s", "peak_memory_gib", "fits", "tflops_per_gpu", "gpu_hours", "cost")
        assert {name: row[name] for name in same} == {name: layout[name] for name in same}
        assert row["tp"] == layout["args"]["tp"]
    pytest.importorskip("pandas")
    assert layouts.to_pandas()["step_time_s"].is_monotonic_increasing


@pytest.mark.process
def test_the_best_are_measured(tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text(
        f'name = "here"\nscheduler = "local"\noutput_path = "{tmp_path}/out"\ngpu_type = "h100"\n'
        f'python_executable = "{STAND_IN}"\nmonitor_interval = 0.2\n'
    )
    (tmp_path / "base.toml").write_text(
        'name = "b"\ndescription = "d"\ntest_template_name = "MegatronBridge"\nextra_env_vars = {STAND_IN = "{}"}\n'
    )
    system = tmp_path / "system.toml"
    layouts = mb.rank_layouts("llama3_8b", num_gpus=8, system=system, launcher="embedded", max_steps=20, top=4)
    scenario = layouts.scenario(system=system, max_trials=2, time_limit="00:05:00", base=tmp_path / "base.toml")
    plan = scenario.plan(max_gpu_hours=100.0)
    assert len(plan.table.rows) == 4
    assert [row["runs"] for row in plan.table.rows] == [1] * 4
    (search,) = plan.run().report().searches
    assert len(search.trials) == 2
    assert search.best


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 0},
        {"num_gpus": 8, "top": 0},
        {"num_gpus": 8, "launcher": "sbatch"},
        {"num_gpus": 8},
        {"num_gpus": 8, "gpu": "gb20"},
    ],
    ids=["num gpus 0 is below", "top 0 is below 1", "launcher sbatch is unknown use", "no GPU is named", "gb20"],
)
def test_bad_options_are_one_line(sentence: Sentence, options: Any) -> None:
    with pytest.raises(mb.BadInput) as error:
        mb.rank_layouts("llama3_8b", **options)
    sentence(error)
    assert "\n" not in str(error.value)


def test_nothing_that_fits_is_an_empty_ranking_that_counts_why(tmp_path: Path, sentence: Sentence) -> None:
    layouts = mb.rank_layouts("llama31_405b", num_gpus=1, gpu="gb200")
    assert layouts.best == layouts.table.rows == ()
    assert layouts.ranking.num_too_large > 0
    (tmp_path / "system.toml").write_text('name = "here"\nscheduler = "local"\n')
    with pytest.raises(mb.BadInput) as caught:
        layouts.scenario(system=tmp_path / "system.toml")
    sentence(caught)
