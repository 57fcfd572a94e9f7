"""Nodes of one NVLink domain: the segment that a point's job asks for, and notes on what no job asks for."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch import render
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from tests.cases import every
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

ARGS: dict[str, Any] = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "max_steps": 10, "time_limit": "5"}


def _plan(nodes: Any, gpu: str | None = "gb200", per_node: int = 4, args: Any = None, **run: Any) -> ScenarioPlan:
    system = slurm_system(gpus_per_node=per_node, gpu_type=gpu, extra_sbatch_args=run.pop("extra_sbatch_args", []))
    sizes = nodes if isinstance(nodes, list) else [nodes]
    num_gpus = [size * per_node for size in sizes]
    known = {**ARGS, "num_gpus": num_gpus, "gb": 256 * 9 * 5 * 7 * 19, "mb": 1, **(args or {})}
    return build_plan(loaded_scenario((run, {"cmd_args": known})), system)


def _segments(plan: ScenarioPlan) -> list[int | None]:
    system = slurm_system(gpus_per_node=4)
    for run in plan.runs:
        (script,) = (text for name, text in render(run, system).items() if name.endswith(".sbatch"))
        assert (f"#SBATCH --segment={run.segment}\n" in script) == (run.segment is not None)
        assert ("--segment" in script) == (run.segment is not None)
    return [run.segment for run in plan.runs]


@every(
    "nodes, gpu, per_node, segment, expected",
    [
        ([4, 8, 16], "gb200", 4, "auto", [4, 8, 16]),
        ([18, 20, 35, 36], "gb200", 4, "auto", [18, 10, 7, 18]),
        ([16], "gb300", 4, "auto", [16]),
        ([4], "h100", 8, "auto", [None]),
        ([1], "gb200", 4, "auto", [None]),
        ([19], "gb200", 4, "auto", [None]),
        ([16, 32], "gb200", 4, 16, [16, 16]),
        ([16], "h100", 8, 4, [4]),
        ([16], None, 4, 8, [8]),
    ],
)
def test_a_segment_for_every_point(
    nodes: list[int], gpu: str | None, per_node: int, segment: int | str, expected: list[int | None]
) -> None:
    assert _segments(_plan(nodes, gpu, per_node, segment=segment)) == expected


@every(
    "keys",
    [
        {"nodes": [8, 12], "segment": 8},
        {"nodes": 8, "gpu": None, "segment": "auto"},
        {"nodes": 8, "segment": 4, "extra_sbatch_args": ["--segment=2"]},
        {"nodes": 8, "segment": "auto", "extra_sbatch_args": ["--segment 2"]},
    ],
)
def test_a_segment_that_cannot_be(sentence: Sentence, keys: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as error:
        _plan(**keys)
    sentence(error)


def test_points_of_other_segments_are_other_jobs() -> None:
    plan = _plan([8], args={"mb": [1, 2]}, segment="auto")
    assert {(run.array, run.segment) for run in plan.runs} == {("arrays/0", 8)}


def test_experts_that_need_a_domain_are_noted(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    """The preset of DeepSeek V3 for 256 GB200 exchanges by HybridEP over 64 ranks, of 16 nodes."""
    args = {"model_recipe_name": "deepseek_v3", "compute_dtype": "bf16", "gb": 2048, "max_steps": 10}
    args |= {"container_image": "/image.sqsh"}  # whose software is unknown, so that no rule asks this machine's
    noted = [note for note in _plan(64, args=args).notes if "ask Slurm for no segment" in note]
    assert noted == [
        "test 't0': ep = 64 exchanges tokens within an NVLink domain of several nodes, and its jobs ask Slurm for no"
        " segment; segment = 'auto' in its [[Tests]] asks for whole groups"
    ]
    asked = ({"segment": "auto"}, {"extra_sbatch_args": ["--segment=16"]})
    assert not any("no segment" in note for keys in asked for note in _plan(64, args=args, **keys).notes)
    assert not any("no segment" in note for note in _plan(64).notes)
    monkeypatch.setenv("SBATCH_QOS", "high")
    monkeypatch.setenv("SBATCH_RESERVATION", "bench")
    (note,) = [note for note in _plan(1).notes if "SBATCH" in note]
    sentence(note)
    assert "bench" not in note
