"""Files that Megatron-Bridge's releases wrote: moved classes, newer keys, null where a value is demanded."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.config.yaml_text import dump_yaml
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema import check_section_values

BRIDGE, LM = "megatron.bridge.training.config", "megatron.training.config"
Make = Callable[..., dict[str, Any]]


def written(tiny: Make) -> dict[str, Any]:
    """Return a file with the traits of those that 0.3.0 to 0.6.0 write."""
    data = tiny()
    data["_target_"] = f"{BRIDGE}.ConfigContainer"
    model = data["model"]
    model["_target_"] = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    model |= {
        "generation_config": None,
        "cuda_graph_scope": None,
        "cuda_graph_modules": ["attn"],
        "params_dtype": "bf16",
    }
    data["logger"] = {"_target_": f"{BRIDGE}.LoggerConfig", "log_interval": 3, "logging_level": None}
    data["rng"] = {"_target_": f"{LM}.common_config.RNGConfig", "seed": 77}
    data["validation"] = {"_target_": f"{LM}.training_config.ValidationConfig", "eval_iters": 5, "start_at_zero": True}
    return data


def _read(path: Path) -> tuple[ConfigContainer, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ConfigContainer.from_yaml(path)
    return config, [text for each in caught if "dropped" in (text := str(each.message))]


def test_it_loads_and_one_warning_lists_what_was_dropped(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(dump_yaml(written(tiny)))
    config, told = _read(tmp_path / "run_config.yaml")
    assert (config.rng.seed, config.validation.eval_iters, config.logger.log_interval) == (77, 5, 3)
    assert config.logger.logging_level is not None
    assert not hasattr(config.model, "generation_config")
    (text,) = told
    for part in ("model.generation_config = None", "logger.logging_level = None", "validation.start_at_zero = True"):
        assert part in text


@pytest.mark.parametrize("module", ["", ".common_config", ".resilience_config", ".training_config"])
def test_classes_that_moved_to_megatron_lm(module: str, tiny: Make) -> None:
    data = tiny() | {"rng": {"_target_": f"{LM}{module}.RNGConfig", "seed": 5}}
    assert ConfigContainer.from_dict(data).rng.seed == 5


def test_planning_is_as_lenient(tiny: Make) -> None:
    check_section_values(written(tiny))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("logger", "logging_level", None, "logger.logging_level: None is null, int is needed"),
        ("validation", "start_at_zero", True, "validation.start_at_zero: unknown key"),
    ],
)
def test_our_own_tables_stay_strict(section: str, key: str, value: Any, words: str, tiny: Make) -> None:
    data = tiny()
    data[section] = {**data.get(section, {}), key: value}
    for check in (ConfigContainer.from_dict, check_section_values):
        with pytest.raises(ConfigError, match=words):
            check(data)


def test_a_wrong_value_in_their_tables_is_still_refused(tiny: Make) -> None:
    data = written(tiny)
    data["rng"]["seed"] = "many"
    with pytest.raises(ConfigError, match=r"rng\.seed: 'many' is a str"):
        ConfigContainer.from_dict(data)
