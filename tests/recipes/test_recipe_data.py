"""Every recipe that ships is a valid training config of the model that it says it is."""

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.flops import count_layers, flops_per_token
from tests.cases import every
from tests.recipes.embedded import embedded_recipes

# FLOPs per token at tp 1 and the default sequence, as published for the reference implementation's formula; DeepSeek's
# is with one multi-token-prediction layer.
GOLDEN = {
    "llama3_8b": (51470401536, 0),
    "llama3_70b": (449222541312, 0),
    "qwen3_30b_a3b": (23006281728, 0),
    "deepseek_v3": (259992950784, 1),
    "qwen3_235b_a22b": (148034813952, 0),
    "kimi_k2": (204477394944, 0),
}


@every("name", embedded_recipes())
def test_a_recipe_is_a_valid_training_config(name: str) -> None:
    recipe = load_recipe(name)
    args = with_recipe_defaults(ResolvedCmdArgs(model_recipe_name=name), recipe)
    config = ConfigContainer.from_dict(training_config(recipe, args, {}))
    assert recipe.name == name
    assert min(len(recipe.description), len(recipe.family), len(recipe.source)) > 0
    assert config.model.hidden_size % config.model.num_attention_heads == 0
    assert config.model.num_attention_heads % (config.model.num_query_groups or 1) == 0
    if "hybrid_layer_pattern" not in recipe.sections["model"]:
        assert sum(count_layers(config.model)) == config.model.num_layers + recipe.mtp_num_layers
    assert config.train.global_batch_size % config.train.micro_batch_size == 0
    assert 0 <= config.optimizer.min_lr <= config.optimizer.lr
    assert flops_per_token(config.model) > 0


@every("name", GOLDEN)
def test_a_known_model_has_its_published_flops(name: str) -> None:
    recipe = load_recipe(name)
    model = ConfigContainer.from_dict(training_config(recipe, ResolvedCmdArgs(model_recipe_name=name), {})).model
    flops, mtp_num_layers = GOLDEN[name]
    assert flops_per_token(model, mtp_num_layers=mtp_num_layers) == flops


def test_the_promised_recipes_ship() -> None:
    assert set(GOLDEN) <= set(recipe_names())
    assert any(load_recipe(name).family == "tiny" for name in recipe_names())


@every("name", ["llama3-8b", "", "../llama3_8b", "LLAMA3_8B"])
def test_an_unknown_recipe_is_bad_input(name: str) -> None:
    with pytest.raises(BadInput, match="unknown recipe"):
        load_recipe(name)


def test_the_nearest_recipe_is_suggested() -> None:
    with pytest.raises(BadInput, match="did you mean 'llama3_8b'"):
        load_recipe("llama3-8b")
