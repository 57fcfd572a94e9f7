"""What a preset has to do with a rejection: the preset, the key and the remedy, in every place that shows rules."""

import io
import json
from collections import Counter
from typing import Any

from cloudai_mbridge.commands.console import SteadyConsole, render_json, show_rejected
from cloudai_mbridge.commands.plan.sweep import _notes
from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.walk import PointWalk, summarize_test
from cloudai_mbridge.sweep.pinned import because
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

CLUSTER = slurm_system(gpus_per_node=4, gpu_type="gb200")
BF16 = "preset llama3_70b pretrain gb200 bf16, 0.6.0"
ARGS = {"launcher": "embedded", "model_recipe_name": "llama3_70b", "num_gpus": 64, "mb": 1, "gb": 128, "max_steps": 10}


def _loaded(**args: Any) -> Any:
    return loaded_scenario(({"id": "t", "num_nodes": 16}, {"cmd_args": {**ARGS, "gpu_type": "gb200", **args}}))


def _lines(**args: Any) -> list[str]:
    (test,) = _loaded(**args).tests
    return [*_notes(summarize_test(PointWalk(test, CLUSTER, RuleSet.RELEASE, None), 0))]


def test_a_rejection_names_the_preset_and_the_key(sentence: Sentence) -> None:
    found = _lines(compute_dtype="bf16", pp=[2, 4])
    assert f"C06 rejects 2, because {BF16} sets use_megatron_fsdp = true" in found
    assert f"C10 rejects 2, because {BF16} sets activation_offload_layers = 20" in found
    own = _lines(compute_dtype="bf16", pp=[2, 4], use_megatron_fsdp=True, activation_offload_layers=2)
    assert {"C06 rejects 2", "C10 rejects 2"} <= {*own}, "these the user wrote"
    plan = build_plan(_loaded(compute_dtype="bf16", pp=[2, 4]), CLUSTER)
    (broken,) = [each for each in plan.rejected[0].violations if each.rule_id == "C06"]
    assert broken.origins["use_megatron_fsdp"] == BF16
    sentence(str(broken))
    sentence(str(broken))
    assert json.loads(render_json(broken))["origins"]["use_megatron_fsdp"] == BF16


def test_the_remedy_holds() -> None:
    off = {"use_megatron_fsdp": False, "activation_offload_layers": 0}
    plan = build_plan(_loaded(compute_dtype="bf16", pp=[2, 4], tp=2, **off), CLUSTER)
    assert not {"C06", "C10", "M16"} & plan.rule_counts.keys()


def test_several_causes_of_one_rule_have_their_numbers(sentence: Sentence) -> None:
    causes = Counter({("C06", "A sets x = 1"): 3, ("C06", "B sets x = 2"): 2, ("C07", "A sets y = 1"): 5})
    assert because(causes, "C06", 6) == ", for 3 because A sets x = 1, for 2 because B sets x = 2"
    assert because(causes, "C07", 5) == ", because A sets y = 1"
    assert because(causes, "C08", 5) == ""
    many = Counter({("C06", f"{number} sets x"): 1 for number in range(9)})
    sentence(because(many, "C06", 9))


def test_settings_that_presets_change_along_the_formats_are_noted() -> None:
    (note,) = [line for line in _lines(compute_dtype=["bf16", "nvfp4"]) if line.startswith("along compute_dtype")]
    assert "use_megatron_fsdp (true: bf16; unset: nvfp4)" in note
    assert "activation_offload_layers (20: bf16; unset: nvfp4)" in note
    assert note.endswith("; set these to compare the formats alone")
    for args in ({"compute_dtype": "bf16"}, {"compute_dtype": ["bf16", "nvfp4"], "use_recipes": True}):
        assert not [line for line in _lines(**args) if line.startswith("along")]
    fixed = {"use_megatron_fsdp": False, "activation_offload_layers": 0}
    (note,) = [line for line in _lines(compute_dtype=["bf16", "nvfp4"], **fixed) if line.startswith("along")]
    assert "use_megatron_fsdp" not in note


def test_points_rejected_alike_are_one_line() -> None:
    plan = build_plan(_loaded(compute_dtype="fp8", mb=[1, 2, 4, 8, 16, 32], use_recipes=True), CLUSTER)
    assert plan.num_rejected == 6
    console = SteadyConsole(file=io.StringIO(), width=400)
    show_rejected(console, plan)
    lines = [line for line in console.file.getvalue().splitlines() if "E02" in line and line.startswith("rejected")]
    (line,) = lines
    assert line.startswith("rejected by E02: 6 points; such as t/mb1: E02 cmd_args.compute_dtype: ")
