"""What estimates change in a plan: the budget, the order, what is held back, and what the report is told."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.commands.console import SteadyConsole, show_rejected
from cloudai_mbridge.estimate.headline import Headline
from cloudai_mbridge.launch.write import plan_to_dict, system_to_dict, write_plan
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.read import read_plan
from cloudai_mbridge.plan.walk import BY_LIMIT, PREDICTED, price_runs
from cloudai_mbridge.report.build import _predicted
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

CLUSTER = slurm_system(gpus_per_node=4, gpu_type="gb200", prices={"currency": "EUR", "gb200": 10.5})
ARGS: dict[str, Any] = {
    **{"launcher": "embedded", "model_recipe_name": "llama3_70b", "num_gpus": 64, "gb": 256, "max_steps": 50},
    **{"tp": [1, 2, 4], "pp": [1, 4], "activation_offload_layers": 0},
    "use_megatron_fsdp": False,  # which the preset has
}


def _plan(
    sweep: dict[str, Any], system: System = CLUSTER, args: dict[str, Any] | None = None, **run: Any
) -> ScenarioPlan:
    loaded = loaded_scenario(({"id": "t", **run}, {"cmd_args": {**ARGS, **(args or {})}, "sweep": sweep}))
    return build_plan(loaded, system)


def test_points_that_may_not_fit_are_counted(sentence: Sentence) -> None:
    text = "test 't': 3 of 6 accepted points predicted not to fit in memory (up to "
    (note,) = [note for note in _plan({}).notes if "predicted" in note]
    assert note.startswith(text)
    sentence(note)
    assert not [note for note in _plan({"memory_share": 0.9}).notes if "predicted" in note]


def test_many_rejected_points_are_told_by_rule() -> None:
    plan = _plan({}, args={"gb": 257, "mb": [2, 3, 4, 5, 6, 7]})
    texts = {}
    for in_full in (False, True):
        console = SteadyConsole(file=io.StringIO(), width=400)
        show_rejected(console, plan, in_full=in_full)
        texts[in_full] = console.file.getvalue().splitlines()
    assert len([line for line in texts[True] if line.startswith("rejected t/")]) >= plan.num_rejected == 36
    by_rule = [line for line in texts[False] if line.startswith("rejected")]
    assert len(by_rule) == len(plan.rule_counts)
    assert any(
        line.startswith("rejected by C04: 36 points; such as t/tp1-pp1-mb2: C04 cmd_args.gb: ") for line in by_rule
    )
    assert "every rejected point: --rejected" in texts[False]


def test_every_run_has_what_is_predicted_of_it(tmp_path: Path) -> None:
    plan = _plan({})
    assert len(plan.runs) == 6  # without a share of memory of its own, a run holds nothing back
    for run in plan.runs:
        assert run.predicted is not None
        assert run.predicted["gpu"] == "gb200"
        assert run.predicted["step_time_s"] > 0
        assert run.predicted["peak_memory_gib"] > 0
    write_plan(plan, tmp_path)
    assert [run.predicted for run in read_plan(tmp_path).runs] == [run.predicted for run in plan.runs]


def test_adapters_are_predicted_without_a_rate_that_the_loop_counts_otherwise() -> None:
    """The loop logs the FLOPs of frozen weights in full, as Megatron-Bridge does; a prediction does not."""
    given = {"pretrained_checkpoint": "/c", "tp": 1, "pp": 4, "use_megatron_fsdp": None}
    lora, sft = (_plan({}, args={**given, "task": task}).runs[0].predicted for task in ("lora", "sft"))
    assert lora
    assert sft
    assert (lora["tflops_per_gpu"], lora["step_time_s"] < sft["step_time_s"]) == (None, True)
    assert lora["peak_memory_gib"] < sft["peak_memory_gib"]


def test_without_a_known_gpu_nothing_is_predicted() -> None:
    unknown = CLUSTER.model_copy(update={"gpu_type": None})
    assert {run.predicted for run in _plan({}, unknown).runs} == {None}


def test_a_share_of_memory_holds_points_back_with_their_terms() -> None:
    plan = _plan({"memory_share": 0.9})
    assert plan.rejected
    assert plan.num_rejected + len(plan.runs) == 6
    for point in plan.rejected:
        (violation,) = point.violations
        assert violation.rule_id == "MEMORY"
        assert "weights" in violation.fact
        assert "sweep.memory_share" in violation.remedy
    json.dumps(plan_to_dict(plan))
    assert plan.rule_counts == {"MEMORY": plan.num_rejected}


def test_the_budget_takes_predictions_where_there_are_any() -> None:
    plan = _plan({"max_gpu_hours": 40})
    assert 0 < len(plan.runs) < 6
    assert any("max_gpu_hours = 40 ends the sweep" in note for note in plan.notes)
    assert any(PREDICTED in note for note in plan.notes)
    limited = _plan({"max_gpu_hours": 40}, CLUSTER.model_copy(update={"gpu_type": None}), time_limit="00:15:00")
    assert len(limited.runs) == 2
    assert not any(PREDICTED in note for note in limited.notes)


def test_a_run_costs_no_more_than_its_time_limit() -> None:
    headline = Headline("gb200", 64, step_time_s=1000.0)
    assert price_runs("test 't'", headline, 64, 50, 60.0, 2) == (pytest.approx(2 * 64 / 60), PREDICTED)
    assert price_runs("test 't'", None, 64, 50, 60.0, 2) == (pytest.approx(2 * 64 / 60), BY_LIMIT)
    assert price_runs("test 't'", headline, 64, None, 60.0, 1) == (pytest.approx(64 / 60), BY_LIMIT)


def test_informative_points_run_first() -> None:
    plan = _plan({"order": "informative", "max_points": 3, "memory_share": 0.9})
    times = [run.predicted["tflops_per_gpu"] for run in plan.runs if run.predicted]
    assert times == sorted(times, reverse=True)
    everything = _plan({"order": "informative"})
    assert sorted(run.label for run in everything.runs) == sorted(run.label for run in _plan({}).runs)


def test_prices_survive_the_way_through_a_run(tmp_path: Path) -> None:
    import toml

    (tmp_path / "system.toml").write_text(toml.dumps(system_to_dict(CLUSTER)))
    assert load_system(tmp_path / "system.toml") == CLUSTER


PLANNED = {"gpu": "h100", "step_time_s": 1.0, "tflops_per_gpu": 400.0, "peak_memory_gib": 70.0}


@pytest.mark.parametrize("said", [{}, {"device": "NVIDIA H100 80GB HBM3"}, {"device": None}])
def test_the_report_has_what_was_predicted(said: dict[str, Any]) -> None:
    assert _predicted(PLANNED, said) == {name: PLANNED[name] for name in PLANNED if name != "gpu"}


@pytest.mark.parametrize("said", [{"device": "cpu"}, {"device": "NVIDIA GB200"}, {"device": "<b>"}])
def test_a_prediction_for_another_device_is_none(said: dict[str, Any]) -> None:
    assert _predicted(PLANNED, said) is None


def test_no_prediction_is_none() -> None:
    assert _predicted(None, {"device": "NVIDIA H100"}) is None
