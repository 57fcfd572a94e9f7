"""Measured points of reports and tables, beside what the shipped model predicts of them."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.memory.estimate import memory_per_stage, worst_stage
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.tune.measured import read_measurements
from tests.cases import every
from tests.gate.history_data import make_point, write_report
from tests.golden import Sentence

FIELDS: dict[str, Any] = {
    "launcher": "embedded",
    "recipe": "llama3_8b",
    "world_size": 8,
    "device": "NVIDIA H100 80GB HBM3",
    "dtype": "bf16",
    "args.tp": 2,
    "args.mb": 1,
    "args.gb": 32,
    "args.model_recipe_name": "llama3_8b",
}


def run(label: str = "tp=2", **changed: Any) -> dict[str, Any]:
    seconds = changed.pop("step_time_s", 2.0)
    more = {name: changed.pop(name) for name in ("verdict", "number") if name in changed}
    return make_point(seconds, label=label, fields=FIELDS | changed, **more)


def test_a_run_stands_beside_its_prediction(tmp_path: Path) -> None:
    points, left_out = read_measurements([write_report(tmp_path / "report.json", [run()])])
    assert not left_out
    (point,) = points["h100"]
    model = architecture(load_recipe("llama3_8b"), ResolvedCmdArgs(tp=2))
    layout = ParallelLayout(num_gpus=8, mbs=1, gbs=32, tp=2, grad_reduce_in_fp32=False)
    assert sum(point.groups) == pytest.approx(
        sum(time_model(model, gpu_named("h100"), Precision.BF16).groups(layout)), rel=0.02
    )
    assert point.step_time_s == 2.0
    peak = worst_stage(memory_per_stage(model, layout)).total / 2**30
    assert point.peak_over_predicted == pytest.approx(10.75 / peak, rel=0.1)  # what lies outside torch's allocator


def test_repetitions_are_one_point(tmp_path: Path) -> None:
    runs = [run(number=number, step_time_s=seconds) for number, seconds in enumerate((1.0, 3.0, 2.0))]
    path = write_report(tmp_path / "report.json", [*runs, run("tp=4", **{"args.tp": 4})])
    assert [point.step_time_s for point in read_measurements([path])[0]["h100"]] == [2.0, 2.0]


def test_a_point_of_several_results_is_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"{night}.json" for night in range(3)]
    for path, seconds in zip(paths, (1.0, 4.0, 2.0), strict=True):
        write_report(path, [run(step_time_s=seconds)])
    (point,) = read_measurements(paths)[0]["h100"]
    assert point.step_time_s == 2.0


@every(
    "changed",
    [
        {"verdict": "failed"},
        {"device": "cpu"},
        {"device": None},
        {"recipe": "llama9_8b"},
        {"args.tp": 3},
        {"args.warp": 3},
        {"launcher": "megatron_bridge"},
        {"step_time_s": None},
    ],
)
def test_what_has_no_prediction_is_left_out_with_its_reason(
    tmp_path: Path, sentence: Sentence, changed: dict[str, Any]
) -> None:
    points, left_out = read_measurements([write_report(tmp_path / "report.json", [run(**changed)])])
    assert not points
    (reason,) = left_out
    sentence(reason)


def test_a_layout_of_the_upstream_launcher_that_is_all_given(tmp_path: Path) -> None:
    sizes = {f"args.{name}": value for name, value in (("pp", 1), ("cp", 1), ("vp", 1))}
    changed = {"launcher": "megatron_bridge", "args.gpu_type": "h100", **sizes}
    points, _ = read_measurements([write_report(tmp_path / "report.json", [run(**changed)])])
    (point,) = points["h100"]
    assert point.peak_over_predicted is None


def test_no_report(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        read_measurements([tmp_path / "nowhere"])
