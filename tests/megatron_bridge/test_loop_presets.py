"""Presets as the embedded loop takes them: what the test leaves open, and nothing that the loop refuses."""

from typing import Any

from cloudai_mbridge.constraints import check
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.presets import ACTS_ON, describe, loop_preset, newest_release, with_loop_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.sweep.checked import with_recipe
from tests.cases import every

LLAMA = {"model_recipe_name": "llama3_8b", "gpu_type": "h100", "num_gpus": 8}
SIZES = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length")
CLUSTER = SlurmSystem(
    name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpu_type="gb200", gpus_per_node=4
)


def written(**cmd_args: Any) -> ResolvedCmdArgs:
    return ResolvedCmdArgs.model_validate({"launcher": "embedded", **cmd_args})


def trained(system: System | None = None, **cmd_args: Any) -> ResolvedCmdArgs:
    """Return a point's arguments as the loop trains them."""
    args = written(**cmd_args)
    return with_recipe(args, load_recipe(args.model_recipe_name), preset=loop_preset(args, gpu_label(args, system)))


def sizes(args: ResolvedCmdArgs) -> dict[str, Any]:
    return {name: value for name in SIZES if (value := getattr(args, name)) is not None}


def test_what_a_test_leaves_open_is_the_presets() -> None:
    expected = {"tp": 1, "pp": 1, "cp": 2, "mb": 1, "gb": 128, "seq_length": 8192}
    assert sizes(trained(**LLAMA)) == expected
    assert expected.keys() <= trained(**LLAMA).model_fields_set  # so that reports hold them
    assert sizes(trained(**{**LLAMA, "num_gpus": 16})) == {**expected, "gb": 256}
    assert sizes(trained(**{**LLAMA, "num_gpus": 64})) == {**expected, "gb": 1024}
    assert sizes(trained(CLUSTER, model_recipe_name="llama3_8b", num_gpus=8)) == {**expected, "cp": 1, "mb": 2}


def test_what_a_test_sets_wins() -> None:
    given = {"tp": 2, "cp": 1, "mb": 4, "gb": 32, "seq_length": 4096}
    assert sizes(trained(**LLAMA, **given)) == {**given, "pp": 1}
    assert sizes(trained(**LLAMA, cp=1))["gb"] == 128
    assert sizes(trained(**{**LLAMA, "num_gpus": 16}, cp=1))["gb"] == 512  # it follows the data-parallel size
    # the recipe's, where upstream would not scale it
    recipes_own = load_recipe("llama3_8b").default("train", "global_batch_size")
    assert trained(**{**LLAMA, "num_gpus": 7}).gb == recipes_own


def test_empty_text_switches_recomputation_off() -> None:
    deepseek = {"model_recipe_name": "deepseek_v3", "gpu_type": "gb200", "num_gpus": 256}
    assert trained(**deepseek).recompute_modules == ["mla_up_proj"]
    assert not trained(**deepseek, recompute_modules="").recompute_modules
    whole = trained(**deepseek, recompute_num_layers=1)
    assert (whole.recompute_modules, whole.recompute_num_layers) == (None, 1)


@every(
    ("system", "args"),
    [
        (None, {"model_recipe_name": "gpt_tiny", "gpu_type": "h100"}),
        (None, {"model_recipe_name": "llama3_8b"}),
        (None, {**LLAMA, "gpu_type": "toaster"}),
        (None, {**LLAMA, "compute_dtype": "fp32"}),
        (LocalSystem(name="here", scheduler="local", gpu_type="h100"), {"model_recipe_name": "llama3_8b"}),
    ],
)
def test_without_a_preset_nothing_changes(system: System | None, args: dict[str, Any]) -> None:
    plain = written(**args)
    assert loop_preset(plain, gpu_label(plain, system)) is None
    assert trained(system, **args) == with_recipe(plain, load_recipe(plain.model_recipe_name))


def test_the_graphs_of_a_preset_are_filled_in() -> None:
    args = written(model_recipe_name="llama3_8b", gpu_type="gb200", num_gpus=8)
    preset = loop_preset(args, "gb200")
    assert preset
    resolved = with_loop_preset(args, preset)
    assert describe(resolved) == (
        "preset llama3_8b pretrain gb200 bf16, 0.6.0 (the newest known release): cp=1, cuda_graph_impl=local,"
        " cuda_graph_scope=full_iteration, gb=128, mb=2, pp=1, seq_length=8192, tp=1"
    )
    data = training_config(load_recipe("llama3_8b"), resolved.args, {})
    assert (data["model"]["cuda_graph_scope"], data["rng"]["te_rng_tracker"]) == (["full_iteration"], True)
    off = with_loop_preset(args.model_copy(update={"cuda_graph_impl": "none"}), preset).args
    assert off.cuda_graph_impl is None or off.cuda_graph_impl == "none"
    assert not off.cuda_graph_scope


def test_layouts_have_the_stages_of_multi_token_prediction() -> None:
    args = {"model_recipe_name": "deepseek_v3", "gpu_type": "gb200", "num_gpus": 256}
    layout = trained(**args).pipeline_model_parallel_layout
    assert layout
    assert layout.endswith("mL")
    assert layout != trained(**args, pp=8, vp=1).pipeline_model_parallel_layout


# Megatron-Bridge ships these for fewer GPUs than their experts need; its own launcher fails with them, too
IMPOSSIBLE = {"C07", "M07"}
NOT_DONE = {"E05"}  # models


def test_every_preset_of_our_recipes_is_a_point_of_the_loop() -> None:
    """Whatever a test leaves open: every recipe, GPU, number format and size that upstream has."""
    presets = catalog(newest_release())
    assert presets
    trains = 0
    for row in presets.rows:
        if row.recipe not in recipe_names() or row.task != "pretrain" or row.variant:
            continue
        names = {"model_recipe_name": row.recipe, "gpu_type": row.gpu, "compute_dtype": row.compute_dtype}
        args, recipe = trained(**names, num_gpus=row.num_gpus), load_recipe(row.recipe)
        broken = {each.rule_id for each in check(args, None, recipe).violations}
        assert broken - NOT_DONE <= IMPOSSIBLE, (row.key, row.num_gpus, broken)
        for name in ACTS_ON:
            own = row.values.get(name)
            is_set = own not in (None, [], False, "none") and (name, own) != ("ep", 1)
            if is_set and name != "pipeline_model_parallel_layout":
                assert getattr(args, name) == own or name == "recompute_num_layers", (row.key, name)
        again = with_recipe(args, recipe, preset=loop_preset(args, row.gpu))
        assert again == args, "what is written out means the same"
        if not broken:
            training_config(recipe, args, {})
            trains += 1
    assert trains > 60
