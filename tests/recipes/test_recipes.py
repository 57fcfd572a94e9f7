"""Every recipe that ships is a valid training config, and what fine-tuning trains otherwise than pre-training."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.presets import loop_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
from cloudai_mbridge.recipes.load import recipe_for
from cloudai_mbridge.sweep.checked import recipe_of, with_recipe
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.flops import count_layers, flops_per_token
from cloudai_mbridge.training.peft.config import LoRA
from tests.cases import every
from tests.golden import Sentence
from tests.recipes.embedded import embedded_recipes

TASKS = ("sft", "lora")
BASE = {"pretrained_checkpoint": "/c"}


def _config(extra: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
    asked = ResolvedCmdArgs(**{"launcher": "embedded", "model_recipe_name": "gpt_tiny", **given})
    preset = loop_preset(asked, asked.gpu_type if "gpu_type" in given else "")
    recipe = recipe_of(asked, preset)
    assert recipe
    return training_config(recipe, with_recipe(asked, recipe, preset=preset), extra or {})


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


@every("name", ["llama3-8b", "", "../llama3_8b", "LLAMA3_8B"])
def test_an_unknown_recipe_is_bad_input(sentence: Sentence, name: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_recipe(name)
    sentence(caught)
    with pytest.raises(BadInput) as caught:
        load_recipe("llama3-8b")
    sentence(caught)


@every("task", TASKS)
@every("name", embedded_recipes())
def test_every_recipe_is_fine_tuned(name: str, task: str) -> None:
    recipe = recipe_for(name, task)
    assert recipe is recipe_for(name, task)  # estimates are cached by it
    assert load_recipe(name).sections["optimizer"] != recipe.sections["optimizer"]
    data = training_config(recipe, ResolvedCmdArgs(model_recipe_name=name, task=task, **BASE), {})
    config = ConfigContainer.from_dict(data)
    assert isinstance(config.peft, LoRA) is (task == "lora")
    assert config.optimizer.lr > config.optimizer.min_lr >= 0


def test_values_are_those_of_upstreams_recipes() -> None:
    sft, lora = (_config(task=task, model_recipe_name="llama3_8b", **BASE) for task in TASKS)
    assert sft["optimizer"].items() >= {"lr": 5e-6, "min_lr": 0.0, "adam_beta2": 0.98}.items()
    assert "peft" not in sft
    assert (sft["rng"]["seed"], sft["model"]["seq_length"]) == (5678, 4096)
    assert lora["optimizer"]["lr"] == 1e-4
    assert (lora["peft"]["dim"], lora["peft"]["alpha"], len(lora["peft"]["target_modules"])) == (8, 16, 4)
    preset = _config(task="lora", model_recipe_name="llama3_70b", gpu_type="h100", num_gpus=8, **BASE)
    assert preset["peft"].items() >= {"dim": 16, "alpha": 32, "target_modules": ["linear_qkv"]}.items()
    assert preset["model"]["virtual_pipeline_model_parallel_size"] == 20
    assert preset["dist"]["use_tp_pp_dp_mapping"] is True


def test_what_a_test_sets_wins() -> None:
    extra = {"peft.dim": "4", "rng.seed": "1", "dist.use_tp_pp_dp_mapping": "false"}
    data = _config(extra, task="lora", lr=0.5, pp=2, **BASE)
    assert (data["peft"]["dim"], data["rng"]["seed"], data["optimizer"]["lr"]) == (4, 1, 0.5)
    assert data["dist"]["use_tp_pp_dp_mapping"] is False


def test_both_names_of_adapters_are_one_task() -> None:
    given = {"model_recipe_name": "llama3_70b", "gpu_type": "gb200", "num_gpus": 8, **BASE}
    assert _config(task="lora", **given) == _config(task="peft", **given)


def test_gradients_of_frozen_weights_are_not_delayed() -> None:
    given = {"model_recipe_name": "moe_tiny", "moe_a2a_overlap": True, "ep": 2, **BASE}
    assert _config(task="sft", **given)["comm_overlap"]["delay_wgrad_compute"] is True
    assert "delay_wgrad_compute" not in _config(task="lora", **given)["comm_overlap"]


@every(
    ("given", "extra", "words"),
    [
        ({"task": "lora"}, {}, "cmd_args.task = 'lora' needs the weights to adapt; set pretrained_checkpoint"),
        ({"task": "sft"}, {"peft.dim": "4"}, "peft.dim has no effect without adapters; set task = 'lora'"),
        ({"task": "lora", **BASE}, {"peft.rank": "4"}, "peft.rank"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], extra: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        _config(extra, **given)


def test_weights_may_be_named_by_an_override() -> None:
    assert _config({"checkpoint.pretrained_checkpoint": "/c"}, task="lora")["checkpoint"] == BASE
