"""The rules on points of the embedded loop against upstream's own validation of the same points.

Upstream is the dry run of Megatron-Bridge 0.6's launcher with its real classes and those of Megatron-Core 0.19: it
joins a preset with the arguments of the point and validates the container (`ConfigContainer.validate`).
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from cloudai_mbridge.constraints import check
from cloudai_mbridge.megatron_bridge.environment import recipe_environment
from cloudai_mbridge.megatron_bridge.presets import loop_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes.load import load_recipe
from cloudai_mbridge.sweep.checked import with_recipe
from tests.figures import Figure
from tests.interop.conftest import BRIDGE_0_6, tree
from tests.interop.test_performance_recipes import CORE_0_6, run
from tests.interop.test_presets import FLAGS

NUM_POINTS = 2200
CORE = "0.19"
# (family, recipe, GPU, number format, GPUs): presets with and without graphs, overlap, sharding, offloading, recompute
BASES = (
    ("llama", "llama3_8b", "h100", "bf16", 8),
    ("llama", "llama3_8b", "h100", "fp8_cs", 8),
    ("llama", "llama3_8b", "gb300", "fp8_mx", 8),
    ("llama", "llama3_8b", "gb200", "nvfp4", 8),
    ("llama", "llama3_70b", "gb200", "nvfp4", 64),
    ("llama", "llama3_70b", "gb300", "bf16", 64),
    ("llama", "llama31_405b", "gb200", "fp8_cs", 128),
    ("qwen", "qwen3_30b_a3b", "h100", "bf16", 16),
    ("qwen", "qwen3_30b_a3b", "gb200", "fp8_mx", 8),
    ("qwen", "qwen3_235b_a22b", "gb300", "fp8_cs", 64),
    ("deepseek", "deepseek_v3", "h100", "fp8_sc", 1024),
    ("deepseek", "deepseek_v3", "gb200", "bf16", 256),
    ("deepseek", "deepseek_v3", "gb200", "fp8_mx", 256),
    ("gpt_oss", "gpt_oss_120b", "gb300", "bf16", 64),
)
# None: as the preset has it. Every axis is at None in half of the points
AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3, 4),
    "pp": (1, 2, 4),
    "vp": (1, 2, 4),
    "cp": (1, 2),
    "ep": (1, 2, 8, 16),
    "graphs": (
        ("none", None),
        ("local", None),
        ("local", "full_iteration"),
        ("transformer_engine", None),
        ("transformer_engine", "attn"),
        ("transformer_engine", "attn,mlp"),
        ("transformer_engine", "moe"),
        ("transformer_engine", "moe_preprocess"),
        ("transformer_engine", "moe_router"),
        ("transformer_engine", "attn,moe_router,moe_preprocess"),
        ("transformer_engine", "moe,moe_router"),
        ("transformer_engine", "full_iteration"),
    ),
    "use_megatron_fsdp": (True,),
    "moe_a2a_overlap": (True,),
    "recompute_num_layers": (1, 4),
    "recompute_modules": (
        *("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts", "attention"),
        *("core_attn,mlp", "moe_act,layernorm"),
    ),
    "activation_offload_layers": (2, 1000),
}
_GROUPS = "refused later, when Megatron-Core makes process groups (parallel_state.initialize_model_parallel)"
_LAYERS = "refused later, when Megatron-Core gives layers to stages (get_num_layers_to_build)"
_CLOUDAI = "CloudAI refuses it, and no published preset has it"
# rule -> why it rejects what upstream's validation lets through
STRICTER = {
    "C02": _LAYERS,
    "C08": _LAYERS,
    "C05": _CLOUDAI,
    "C06": _CLOUDAI,
    "C07": _GROUPS,
    "M03": _GROUPS,
    "M07": _GROUPS,
    "M17": "Megatron FSDP with graphs of whole layers: as C05",
    "E06": "trained incorrectly: replicated experts drift apart without an error",
}
# words of upstream's refusal -> why the rules let that through
LAXER = {
    "selective recompute_num_layers must be None": "modules of the test replace layers of the preset",
    "only for full-iteration CUDA graphs": "the loop captures whole layers locally, as Megatron-Core does",
    "CUDA_DEVICE_MAX_CONNECTIONS > 1": "the loop sets several queues for Megatron FSDP itself",
    "moe_paged_stash cannot be enabled with cpu_offloading": "presets of the loop have no paged stash",
}

Point = dict[str, Any]


def points() -> Iterator[Point]:
    """Yield points, the same ones every time: half of the arguments of each are its preset's."""
    draw = random.Random(0)
    for index in range(NUM_POINTS):
        family, recipe, gpu, dtype, num_gpus = BASES[index % len(BASES)]
        point: Point = {"model_family_name": family, "model_recipe_name": recipe, "gpu_type": gpu}
        point |= {"compute_dtype": dtype, "num_gpus": num_gpus}
        names = draw.sample(sorted(AXES), draw.randint(0, 4))
        chosen = {name: draw.choice(AXES[name]) for name in names}
        impl, scope = chosen.pop("graphs", (None, None))
        graphs = {"cuda_graph_impl": impl, "cuda_graph_scope": scope}
        yield point | chosen | {name: value for name, value in graphs.items() if value is not None}


def argv(point: Point) -> list[str]:
    """Return the launcher's options; vp = 1 is None there."""
    words = []
    for name, value in point.items():
        text = "None" if name == "vp" and value == 1 else str(value).lower() if isinstance(value, bool) else str(value)
        words += [FLAGS[name], text]
    return words


def violations(point: Point) -> list[str]:
    """Return the rules that reject a point of the embedded loop."""
    asked = ResolvedCmdArgs.model_validate({"launcher": "embedded", **point})
    recipe, preset = load_recipe(asked.model_recipe_name), loop_preset(asked, asked.gpu_type)
    args = with_recipe(asked, recipe, preset=preset)
    env = recipe_environment(args, args.gpu_type, preset)
    found = check(args, recipe=recipe, core=CORE, env=env)
    return [violation.rule_id for violation in found.violations]


def judged_upstream(chosen: list[Point]) -> list[str | None]:
    """Return what upstream's validation has against each point."""
    lines = [{"gpu": p["gpu_type"], "num_gpus": p["num_gpus"], "argv": argv(p)} for p in chosen]
    given = "".join(json.dumps(line) + "\n" for line in lines)
    answers = run("judge_points.py", str(tree(BRIDGE_0_6)), given=given)
    return [json.loads(line) for line in answers.splitlines()]


def test_the_rules_decide_as_upstream(figure: Figure) -> None:
    if not (CORE_0_6 / "megatron/core").is_dir():
        pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
    chosen = list(points())
    counts: Counter[str] = Counter()
    false_rejections, false_acceptances = defaultdict(list), defaultdict(list)
    for point, refusal in zip(chosen, judged_upstream(chosen), strict=True):
        rules = violations(point)
        counts[f"{'refused' if refusal else 'taken'} by upstream, {'refused' if rules else 'taken'} by the rules"] += 1
        if refusal is None:
            counts.update(f"stricter: {rule}" for rule in set(rules) & STRICTER.keys())
            if others := set(rules) - STRICTER.keys():
                false_rejections[",".join(sorted(others))].append(point)
        elif not rules:
            known = [words for words in LAXER if words in refusal]
            counts.update(f"laxer: {words}" for words in known)
            if not known:
                false_acceptances[refusal].append(point)
    figure(
        f"{len(chosen)} points, false rejections {sum(map(len, false_rejections.values()))}, false acceptances"
        f" {sum(map(len, false_acceptances.values()))}; {dict(sorted(counts.items()))}"
    )
    assert dict(false_rejections) == {}
    assert dict(false_acceptances) == {}
    assert all(counts[f"{ours} by upstream, {ours} by the rules"] > 500 for ours in ("taken", "refused"))
