"""What the formulas read of a model: recipe, arguments, Megatron's defaults."""

from dataclasses import fields
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.flops import count_layers, flops_per_token
from cloudai_mbridge.training.startup.prepare import adapt_to_device
from tests.cases import every
from tests.golden import Sentence
from tests.recipes.embedded import embedded_recipes


def arch_of(name: str, extra: dict[str, str] | None = None, **args: Any) -> Architecture:
    return architecture(load_recipe(name), ResolvedCmdArgs(model_recipe_name=name, **args), extra)


# They change neither FLOPs nor memory
NUMBERS_ONLY = (
    *("moe_router_load_balancing_type", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_router_force_load_balancing"),
    *("rope_type", "rope_scaling", "rope_scaling_factor", "rotary_scaling_factor", "beta_fast", "mscale_all_dim"),
    *("init_method_std", "bias_dropout_fusion", "persist_layer_norm", "moe_router_fusion", "attention_backend"),
    *("use_fused_weighted_squared_relu", "calculate_per_token_loss", "mtp_loss_scaling_factor", "glu_linear_offset"),
    *("activation_func_clamp_value", "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "cp_comm_type"),
)


@every("name", recipe_names())
def test_nothing_of_a_recipes_model_is_lost(name: str) -> None:
    recipe, arch = load_recipe(name), architecture(load_recipe(name))
    for field, value in recipe.sections["model"].items():
        if field in NUMBERS_ONLY:
            continue
        assert getattr(arch, field) == (tuple(value) if isinstance(value, list) else value), field
    assert arch.recipe == name
    assert arch.mtp_num_layers == recipe.mtp_num_layers
    assert hash(arch) == hash(architecture(recipe))


@every("name", embedded_recipes())
def test_the_model_is_the_one_that_the_loop_builds(name: str) -> None:
    args: dict[str, Any] = {"launcher": "embedded", "tp": 2, "num_layers": 5, "seq_length": 256, "vocab_size": 1000}
    recipe, arch = load_recipe(name), arch_of(name, **args)
    config = training_config(recipe, ResolvedCmdArgs(model_recipe_name=name, **args), {})
    container = ConfigContainer.from_dict(config)
    adapt_to_device(container, has_gpu=False)  # its fusions need Transformer Engine
    model = container.model
    model.finalize()
    compared = 0
    for field in fields(Architecture):
        if field.name in ("recipe", "activation") or not hasattr(model, field.name):
            continue
        built = getattr(model, field.name)
        if built is None and field.name == "mtp_num_layers":
            built = 0
        assert getattr(arch, field.name) == (tuple(built) if isinstance(built, list) else built), field.name
        compared += 1
    assert compared > 40
    assert arch.padded_vocab_size == model.padded_vocab_size
    assert model.activation_func.__name__ == arch.activation


def test_megatrons_own_defaults_hold() -> None:
    bare = arch_of("gpt_tiny")
    assert (bare.kv_channels, bare.moe_layer_freq, bare.num_moe_experts) == (32, 1, None)
    assert bare.moe_ffn_hidden_size is None
    assert arch_of("moe_tiny", {"model.moe_ffn_hidden_size": "null"}).moe_ffn_hidden_size == 256


def test_arguments_go_before_the_recipe() -> None:
    arch = arch_of("llama3_8b", num_layers=2, hidden_size=1024, vocab_size=1000, seq_length=64, tp=4)
    sizes = (arch.num_layers, arch.hidden_size, arch.vocab_size, arch.seq_length, arch.padded_vocab_size)
    assert sizes == (2, 1024, 1000, 64, 1024)
    assert arch.kv_channels == 128  # the recipe's


def test_extra_arguments_go_last() -> None:
    extra = {"model.window_size": "[16, 0]", "model.mtp_num_layers": "1", "optimizer.lr": "1", "model.no_such": "1"}
    arch = arch_of("llama3_8b", extra, launcher="embedded")
    assert (arch.window_size, arch.mtp_num_layers) == ((16, 0), 1)


@every("text", ["wide", "-1", "2.5", "true", "[1]"])
def test_an_extra_argument_that_is_no_size(sentence: Sentence, text: str) -> None:
    with pytest.raises(BadInput, match=r"model\.ffn_hidden_size") as caught:
        arch_of("llama3_8b", {"model.ffn_hidden_size": text})
    sentence(caught)


# Multi-token prediction


def test_who_trains_multi_token_prediction() -> None:
    assert arch_of("deepseek_v3").mtp_num_layers == 1
    assert arch_of("deepseek_v3", launcher="embedded").mtp_num_layers == 1
    assert arch_of("deepseek_v3", {"model.mtp_num_layers": "0"}).mtp_num_layers == 0
    assert architecture(load_recipe("deepseek_v3"), mtp_num_layers=0).mtp_num_layers == 0


def test_without_prediction_a_pattern_has_no_blocks_of_it() -> None:
    with_it, without = arch_of("nemotron_3_super"), architecture(load_recipe("nemotron_3_super"), mtp_num_layers=0)
    assert with_it.hybrid_layer_pattern == f"{without.hybrid_layer_pattern}/*E/*E"
    assert flops_per_token(without) == flops_per_token(with_it, mtp_num_layers=0)


# Other numbers of layers


@every("name", recipe_names())
@every("layers", [1, 2, 7, 61, 200])
def test_every_recipe_takes_any_number_of_layers(name: str, layers: int) -> None:
    arch = arch_of(name, num_layers=layers)
    assert arch.num_layers == layers
    assert flops_per_token(arch) > 0
    if arch.hybrid_layer_pattern is not None:
        decoder, *prediction = arch.hybrid_layer_pattern.split("/")
        assert (len(decoder), len(prediction)) == (layers, arch.mtp_num_layers)
    elif arch.num_moe_experts is not None:
        assert sum(count_layers(arch)) == layers + arch.mtp_num_layers


def test_a_shorter_model_begins_like_the_whole_one() -> None:
    assert arch_of("deepseek_v3", num_layers=5).moe_layer_freq == (0, 0, 0, 1, 1)
    assert arch_of("deepseek_v4_flash", num_layers=4).csa_compress_ratios == (0, 0, 4, 128, 0)
    assert arch_of("nemotron_3_super", num_layers=8).hybrid_layer_pattern == "MEMEMEM*/*E/*E"
    assert arch_of("nemotron_3_nano", num_layers=60).hybrid_layer_pattern.endswith("MEMEM*EM")  # type: ignore[union-attr]
