"""Every recipe that ships is a valid container under its published parallelism, without a GPU."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.estimate.published import TABLE
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.config import ConfigContainer, runtime_config_update
from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config
from cloudai_mbridge.training.startup.prepare import adapt_to_device
from tests.cases import every
from tests.recipes.embedded import embedded_recipes

MODELS = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama31_405b",
    "DeepSeekV3": "deepseek_v3",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
    "Kimi_K2": "kimi_k2",
    "GPT OSS 120B": "gpt_oss_120b",
}
GPUS = (1, 8, 64, 256)
# Format -> the mixed-precision recipe that upstream's performance recipes take, and what they set otherwise
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16_mixed", {}),
    "fp8_cs": ("bf16_with_fp8_current_scaling_mixed", {"first_last_layers_bf16": False}),
    "fp8_ds": ("bf16_with_fp8_delayed_scaling_mixed", {}),
    "fp8_mx": ("bf16_with_mxfp8_mixed", {}),
    "fp8_sc": ("bf16_with_fp8_subchannel_scaling_mixed", {}),
    "nvfp4": ("bf16_with_nvfp4_mixed", {}),
}
EMBEDDED = embedded_recipes()


def published(recipe: str) -> list[dict[str, int]]:
    """Return the layouts that were published for a recipe; one rank for one of which nothing was."""
    with TABLE.open(encoding="utf-8") as text:
        rows = [
            row for row in csv.DictReader(text) if MODELS.get(row["model"]) == recipe and row["tp"] not in ("", "n/a")
        ]
    names = ("tp", "pp", "cp", "vp", "ep")
    layouts = {tuple((n, int(row[n])) for n in names if row[n] not in ("", "n/a")) for row in rows}
    return [dict(layout) for layout in sorted(layouts)] or [{}]


def container(recipe: str, layout: dict[str, int], gpus: int, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    args = ResolvedCmdArgs(model_recipe_name=recipe, num_gpus=gpus, max_steps=10, **layout)
    loaded = load_recipe(recipe)
    data = training_config(loaded, with_recipe_defaults(args, loaded), {})
    config: ConfigContainer = ConfigContainer.from_dict(data)
    adapt_to_device(config, has_gpu=False)
    runtime_config_update(config)
    return config


@every("name", FORMATS)
def test_a_format_is_that_of_upstreams_performance_recipes(name: str) -> None:
    recipe, others = FORMATS[name]
    args = ResolvedCmdArgs(model_recipe_name="gpt_tiny", compute_dtype=name)
    data = training_config(load_recipe("gpt_tiny"), args, {}, installed_release())
    expected = replace(get_mixed_precision_config(recipe), grad_reduce_in_fp32=False, **others)
    assert ConfigContainer.from_dict(data).mixed_precision == expected


@every("gpus", GPUS)
@every("recipe", EMBEDDED)
def test_a_recipe_is_valid_where_its_layout_fits(recipe: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in published(recipe):
        ranks = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
        if gpus % ranks:
            with pytest.raises(AssertionError, match="is not divisible by"):
                container(recipe, layout, gpus, monkeypatch)
            continue
        config = container(recipe, layout, gpus, monkeypatch)
        check(config, recipe, layout, gpus // ranks)


def check(config: Any, recipe: str, layout: dict[str, int], data_parallel: int) -> None:
    model = config.model
    assert config.data_parallel_size == data_parallel, (recipe, layout)
    assert model.tensor_model_parallel_size == layout.get("tp", 1)
    assert model.pipeline_model_parallel_size == layout.get("pp", 1)
    assert (model.bf16, config.optimizer.bf16) == (True, True)
    assert config.scheduler.lr_decay_steps == 10 * config.train.global_batch_size
    before = config.to_dict()
    config.validate()
    assert config.to_dict() == before
    assert ConfigContainer.from_dict(before).to_dict() == before


def test_there_is_a_published_layout_of_the_large_recipes() -> None:
    assert all(published(recipe) != [{}] for recipe in ("llama3_8b", "deepseek_v3", "qwen3_30b_a3b", "kimi_k2"))
