"""The fast way says of every point what the plain way says, whatever the axes are."""

import itertools
import random
from typing import Any

import pytest

from cloudai_mbridge.constraints import Lifted, NotEvaluated, RuleSet, Upstream, Violation, check
from cloudai_mbridge.constraints.engine import with_origins
from cloudai_mbridge.megatron_bridge.presets import given_to_loop
from cloudai_mbridge.megatron_bridge.release import find_release
from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.sweep.checked import checked_points, recipe_of, with_recipe
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import pinned_by

SLURM = SlurmSystem(name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpus_per_node=4)
LOCAL = LocalSystem(name="l", scheduler="local")

# every argument that some rule looks at, with values that some rule objects to
VALUES: dict[str, list[Any]] = {
    "launcher": ["embedded", "megatron_bridge", "megatron_bridge"],
    "model_recipe_name": ["gpt_tiny", "moe_tiny", "deepseek_v3", "llama3_70b"],
    "model_family_name": ["llama", "deepseek"],
    "config_variant": ["v1", "v2", "v9"],
    "gpu_type": ["h100", "gb200", "tpu"],
    "compute_dtype": ["bf16", "fp8_mx", "fp32", "nonsense"],
    "num_gpus": [1, 2, 8, 64, 0, 12],
    "gpus_per_node": [4, 8],
    "max_steps": [10, 0],
    "tp": [1, 2, 3, 0, -1],
    "pp": [1, 2, 4],
    "cp": [1, 2],
    "vp": [1, 2, 5, 0],
    "ep": [1, 2, 64],
    "et": [1, 2, 0],
    "mb": [1, 2, 0],
    "gb": [8, 12, 256, 0],
    "seq_length": [64, 66, 4096],
    "num_layers": [4, 6, 61],
    "hidden_size": [128, 0],
    "use_megatron_fsdp": [True, False],
    "num_distributed_optimizer_instances": [1, 2],
    "cuda_graph_impl": ["none", "local", "transformer_engine", "te"],
    "cuda_graph_scope": ["", "attn", "moe,moe_router", "moe_preprocess", "full_iteration", "mlp"],
    "recompute_modules": ["core_attn", "mlp,layernorm", "mla_up_proj", "nonsense"],
    "recompute_num_layers": [1, 0, 99],
    "activation_offload_layers": [0, 2, 99],
    "moe_a2a_overlap": [True, False],
    "pipeline_model_parallel_layout": ["Et|tttL", "Ett|ttL", "x"],
    "container_image": ["", "image"],
    "use_tokendrop": [True, False],
    "task": ["pretrain", "sft"],
}


def random_test(draw: random.Random) -> tuple[TestDefinition, TestRun]:
    """Make a test of up to seven axes and some fixed arguments."""
    names = draw.sample(sorted(VALUES), draw.randint(1, 14))
    axes = {name: draw.sample(VALUES[name], draw.randint(1, len(VALUES[name]))) for name in names[:7]}
    fixed = {name: draw.choice(VALUES[name]) for name in names[7:]}
    args = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", **fixed, **axes}
    nodes = draw.choice([None, 1, 2, [1, 2]])
    definition = TestDefinition(name="t", description="", cmd_args=MegatronBridgeCmdArgs(**args))
    return definition, TestRun(id="t", test_name="t", num_nodes=nodes)


def seeds(number: int) -> list[Any]:
    """Return seeds, of which all but the first six are for the drills."""
    return [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.drill) for seed in range(number)]


@pytest.mark.parametrize("seed", seeds(60))
def test_the_screen_agrees_with_the_plain_check(seed: int) -> None:
    draw = random.Random(seed)
    definition, run = random_test(draw)
    system = draw.choice([None, SLURM, LOCAL])
    release, overridden = (
        draw.choice(["main", "v0.3.0", "v0.6.0"]),
        draw.sample(["tp", "gb", "num_layers"], draw.randint(0, 2)),
    )
    pinned = Upstream(find_release(release), None, draw.choice(list(RuleSet)), frozenset(overridden))
    sweep = SweepSpace(definition, run)
    seen = 0
    for point in itertools.islice(checked_points(sweep, system, pinned), 0, 20_000, draw.choice([1, 7, 31])):
        plain = sweep.point(point.coordinates)
        nodes = plain.num_nodes if plain.args.launcher == "embedded" else None  # upstream's launcher is not told
        preset = pinned.preset_of(plain.args) if plain.args.launcher == "embedded" else None
        recipe = recipe_of(plain.args, preset)
        args = with_recipe(plain.args, recipe, preset=preset)
        expected = check(args, system, recipe, nodes, pinned.at(plain.args))
        violations = [with_origins(each, given_to_loop(plain.args), preset) for each in expected.violations]
        assert sorted(map(str, point.violations)) == sorted(map(str, violations)), point.coordinates
        silent = sorted(str(a) for a in point.answers if isinstance(a, NotEvaluated))
        assert silent == sorted(map(str, expected.not_evaluated)), point.coordinates
        assert sorted(map(str, point.lifted)) == sorted(map(str, expected.lifted)), point.coordinates
        assert all(isinstance(answer, Violation | NotEvaluated | Lifted) for answer in point.answers)
        seen += 1
        if seen > 300:
            break
    assert seen


UPSTREAM: dict[str, Any] = {
    "llama3_70b": {"model_family_name": "llama", "gpu_type": ["gb200", "h100"], "compute_dtype": ["bf16", "fp8_cs"]},
    "deepseek_v3": {
        "model_family_name": "deepseek",
        "gpu_type": ["gb300", "h100"],
        "compute_dtype": ["bf16", "fp8_mx"],
    },
}


@pytest.mark.parametrize("seed", seeds(40))
def test_the_screen_agrees_with_the_plain_check_where_presets_fill_in(seed: int) -> None:
    draw = random.Random(seed)
    recipe_name = draw.choice(list(UPSTREAM))
    names = draw.sample(sorted(VALUES.keys() - {"launcher", "model_recipe_name", *UPSTREAM[recipe_name]}), 6)
    axes = {name: draw.sample(VALUES[name], draw.randint(1, len(VALUES[name]))) for name in names}
    args = {"model_recipe_name": recipe_name, **UPSTREAM[recipe_name], "num_gpus": [64, 256, 1024], **axes}
    definition = TestDefinition(name="t", description="", cmd_args=MegatronBridgeCmdArgs(**args))
    sweep = SweepSpace(definition, TestRun(id="t", test_name="t"))
    overridden = draw.sample(["ep", "mb", "num_moe_experts", "cuda_graph_scope"], draw.randint(0, 2))
    pinned = Upstream(find_release(draw.choice(["v0.3.0", "v0.5.1", "v0.6.0"])), overridden=frozenset(overridden))
    for point in itertools.islice(checked_points(sweep, SLURM, pinned), 0, 20_000, draw.choice([7, 31, 91])):
        plain = sweep.point(point.coordinates).args
        recipe = recipe_of(plain)
        expected = check(with_recipe(plain, recipe), SLURM, recipe, None, pinned.at(plain))
        for kind, answers in (
            (Violation, expected.violations),
            (NotEvaluated, expected.not_evaluated),
            (Lifted, expected.lifted),
        ):
            found = sorted(str(answer) for answer in point.answers if isinstance(answer, kind))
            assert found == sorted(map(str, answers)), point.coordinates


LOOP: dict[str, Any] = {
    "llama3_70b": {
        **{"gpu_type": ["h100", "gb300", "tpu"], "compute_dtype": ["bf16", "fp32"], "num_gpus": [48, 64, 100]},
        "task": ["pretrain", "sft", "lora"],
    },
    "deepseek_v3": {"gpu_type": ["h100", "vr200"], "compute_dtype": ["bf16", "fp8_mx"], "num_gpus": [64, 256, 1024]},
    "gpt_oss_120b": {"gpu_type": ["h100", "b200"], "compute_dtype": ["bf16"], "num_gpus": [64, 72]},
}


EXTRA = {
    "model.num_attention_heads": ("12", "many"),
    "model.num_layers_in_first_pipeline_stage": ("3", "0"),
    "model.account_for_loss_in_pipeline_split": ("true",),
    "model.mtp_num_layers": ("0", "1"),
    "model.moe_router_topk": ("1", "9999"),
    "model.sequence_parallel": ("false",),
    "dist.use_megatron_fsdp": ("true",),
}


@pytest.mark.parametrize("seed", seeds(40))
def test_the_screen_agrees_with_the_plain_check_where_presets_fill_in_the_loops(seed: int) -> None:
    draw = random.Random(seed)
    recipe_name = draw.choice(list(LOOP))
    fixed = {"launcher", "model_recipe_name", "use_recipes", "config_variant", "task", *LOOP[recipe_name]}
    names = draw.sample(sorted(VALUES.keys() - fixed), 6)
    axes = {name: draw.sample(VALUES[name], draw.randint(1, len(VALUES[name]))) for name in names}
    args = {"launcher": "embedded", "model_recipe_name": recipe_name, **LOOP[recipe_name], **axes}
    extra = {key: draw.choice(values) for key, values in EXTRA.items() if draw.random() < 0.3}
    shared = {"name": "t", "description": "", "extra_cmd_args": extra}
    definition = TestDefinition.model_validate(
        {**shared, "cmd_args": args, "sweep": {"include": [{"tp": 16, "gb": 7}, {"mb": 5}]}}
    )
    sweep = SweepSpace(definition, TestRun(id="t", test_name="t"))
    pinned = pinned_by(definition, SLURM)
    filled = 0
    for point in itertools.islice(checked_points(sweep, SLURM, pinned), 0, 30_000, draw.choice([7, 31, 91])):
        plain = sweep.point(point.coordinates).args
        preset = pinned.preset_of(plain)
        recipe = recipe_of(plain, preset)
        expected = check(with_recipe(plain, recipe, preset=preset), SLURM, recipe, settings=pinned.settings)
        violations = [with_origins(each, given_to_loop(plain), preset) for each in expected.violations]
        assert sorted(map(str, point.violations)) == sorted(map(str, violations)), point.coordinates
        silent = sorted(str(answer) for answer in point.answers if isinstance(answer, NotEvaluated))
        assert silent == sorted(map(str, expected.not_evaluated)), point.coordinates
        filled += preset is not None
    assert filled


def test_a_grid_of_a_million_points_is_checked_one_at_a_time() -> None:
    axes = {name: list(range(1, 33)) for name in ("tp", "pp", "cp", "mb")}
    args = MegatronBridgeCmdArgs(launcher="embedded", model_recipe_name="gpt_tiny", num_gpus=64, gb=64, **axes)
    definition = TestDefinition(name="t", description="", cmd_args=args)
    sweep = SweepSpace(definition, TestRun(id="t", test_name="t"))
    assert sweep.grid.size == 32**4
    first = next(iter(checked_points(sweep, LOCAL)))
    assert first.coordinates == {"tp": 1, "pp": 1, "cp": 1, "mb": 1}
