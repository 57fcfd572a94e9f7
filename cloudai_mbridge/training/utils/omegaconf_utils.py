"""Megatron-Bridge's names for changing a configuration from a file and the command line; OmegaConf is not needed.

What hands out OmegaConf's own objects (`create_omegaconf_dict_config`, `parse_hydra_overrides`) does not exist here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cloudai_mbridge.training.config import overrides
from cloudai_mbridge.training.config.yaml_text import read_yaml
from cloudai_mbridge.training.errors import ConfigError

__all__ = ["OverridesError", "apply_overrides", "process_config_with_overrides"]
OverridesError = ConfigError
T = TypeVar("T")


def process_config_with_overrides(
    config: T, config_filepath: str | Path | None = None, cli_overrides: Sequence[str] | None = None
) -> T:
    """Change `config` in place as a YAML file, then `key=value` texts say, and return it.

    Raises:
        FileNotFoundError: there is no such file.
        OverridesError: what cannot be applied; `config` is unchanged then.
    """
    texts = list(cli_overrides or ())
    if config_filepath:
        data = read_yaml(Path(config_filepath)) or {}
        if not isinstance(data, dict):
            raise OverridesError(f"{config_filepath}: a table of sections is needed")
        texts = [*_texts(data), *texts]
    return overrides.apply_overrides(config, texts)


def apply_overrides(config_obj: Any, overrides_dict: Mapping[str, Any], excluded_fields: Any = None) -> None:
    """Change `config_obj` in place as nested tables say. excluded_fields: not used."""
    overrides.apply_overrides(config_obj, list(_texts(overrides_dict)))


def _texts(table: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yield `a.b=value` for every leaf; a table that names its class is one."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value and "_target_" not in value:
            yield from _texts(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}={json.dumps(value)}"
