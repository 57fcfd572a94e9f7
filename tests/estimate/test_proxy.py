"""Proxies: fewer layers, the same shapes, every kind of layer, and a definition that can be planned."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from cloudai_mbridge.constraints import check
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import parameters_per_stage, total_parameters
from cloudai_mbridge.estimate.proxy import choose, pipeline_layout, proxy, render_proxy
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.loading import load_test_definition
from cloudai_mbridge.models.pipeline_layout import layout_fault
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
from cloudai_mbridge.sweep.checked import checked_points
from cloudai_mbridge.sweep.expand import SweepSpace
from tests.cases import every
from tests.golden import Sentence

LAYERS = (2, 4, 8)
_MAY_DIFFER = {
    *("num_layers", "moe_layer_freq", "hybrid_layer_pattern", "csa_compress_ratios", "window_attn_skip_freq"),
    *("linear_attention_freq", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
}


def _cases() -> list[tuple[str, int]]:
    return [
        (name, layers)
        for name in recipe_names()
        for layers in LAYERS
        if layers <= load_recipe(name).default("model", "num_layers")
    ]


def _shapes(model: Architecture) -> Architecture:
    whole = architecture(load_recipe(model.recipe))
    return replace(model, **{name: getattr(whole, name) for name in _MAY_DIFFER})


@every(("name", "layers"), _cases())
def test_a_proxy_keeps_the_shapes(name: str, layers: int) -> None:
    small = architecture(proxy(load_recipe(name), layers))
    assert small.num_layers == layers
    assert _shapes(small) == architecture(load_recipe(name))
    if small.hybrid_layer_pattern:
        assert len(small.hybrid_layer_pattern.split("/")[0]) == layers


@every(("name", "layers"), _cases())
def test_a_proxy_passes_the_rules(name: str, layers: int) -> None:
    small = proxy(load_recipe(name), layers)
    args = ResolvedCmdArgs(model_recipe_name=name, num_gpus=1, mb=1, gb=4, num_layers=layers)
    assert check(with_recipe_defaults(args, small), None, small).violations == ()
    assert len(parameters_per_stage(architecture(small, args), ParallelLayout())) == 1


@every(("name", "layers"), _cases())
def test_the_written_definition_is_the_proxy(name: str, layers: int, tmp_path: Path) -> None:
    """Read back, planned and, where the embedded loop can build it, configured: the architecture is the proxy's."""
    small = proxy(load_recipe(name), layers)
    path = tmp_path / "test.toml"
    path.write_text(render_proxy(load_recipe(name), layers, 1, 10))
    definition = load_test_definition(path)
    (point,) = checked_points(SweepSpace(definition, TestRun(id="t", test_name="t")), None)
    assert point.violations == ()
    _, args, recipe = point.resolve()
    assert recipe is not None
    read = architecture(recipe, args, definition.extra_cmd_args, mtp_num_layers=0)
    assert read == architecture(small, args, mtp_num_layers=0)
    assert total_parameters(read) > 0
    if not recipe.not_embedded:
        model = training_config(recipe, args, definition.extra_cmd_args)["model"]
        assert model["num_layers"] == layers
        if isinstance(freq := small.sections["model"].get("moe_layer_freq"), list):
            assert model["moe_layer_freq"] == freq


@every(("name", "layers"), [("deepseek_v3", 2), ("kimi_k2", 2), ("deepseek_v3", 8)])
def test_dense_and_expert_layers_stay(name: str, layers: int) -> None:
    freq = architecture(proxy(load_recipe(name), layers)).moe_layer_freq
    assert isinstance(freq, tuple)
    assert set(freq) == {0, 1}


def test_every_block_of_a_hybrid_model_stays() -> None:
    for layers in (3, 4, 8):
        pattern = architecture(proxy(load_recipe("nemotron_3_nano"), layers)).hybrid_layer_pattern
        assert pattern is not None
        assert set(pattern) == {"M", "E", "*"}


def test_the_whole_recipe_is_its_own_proxy() -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        assert proxy(recipe, recipe.default("model", "num_layers")) == recipe


@every("layers", [0, -1, 62])
def test_too_few_and_too_many_layers(sentence: Sentence, layers: int) -> None:
    with pytest.raises(BadInput) as caught:
        proxy(load_recipe("deepseek_v3"), layers)
    sentence(caught)


def test_pipeline_layouts_shrink_with_the_layers() -> None:
    small = proxy(load_recipe("deepseek_v3"), 10)
    assert set(small.pipeline_layouts) == {"4", "8"}
    for stages, text in small.pipeline_layouts.items():
        assert layout_fault(text, int(stages), None, 10, 1) is None


@every(("layers", "stages"), [(1, 1), (5, 2), (7, 4), (8, 8)])
def test_a_layout_has_every_layer(layers: int, stages: int) -> None:
    assert layout_fault(pipeline_layout(layers, stages), stages, None, layers, 0) is None


@every("count", range(1, 8))
def test_choose_keeps_order_and_proportion(count: int) -> None:
    chosen = choose("AABBBBB", count)
    assert len(chosen) == count
    assert chosen == sorted(chosen)
    assert count < 2 or set(chosen) == {"A", "B"}


def test_hostile_text_stays_text() -> None:
    """A recipe's words are data in the TOML."""
    recipe = replace(load_recipe("gpt_tiny"), family='x"\n[evil]')
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads('a = "x"\n[evil]"')
    assert tomllib.loads(render_proxy(recipe, 2, 1, 10))["cmd_args"]["model_family_name"] == recipe.family
