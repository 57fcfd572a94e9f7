"""Config objects to plain data, YAML and JSON, and back.

`_target_` names classes, functions, dtypes and enum members, as in Megatron-Bridge's files; only names of `known_names`
and classes that annotations name are taken.
"""

import copy
from pathlib import Path
from typing import Any, TypeVar

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.text.decode import LiveCatalog
from cloudai_mbridge.training.config.text.describe import class_path
from cloudai_mbridge.training.config.text.encode import encode, is_config
from cloudai_mbridge.training.config.text.summary import warn_rank_0
from cloudai_mbridge.training.config.text.yaml_text import MAX_CHARS, dump_yaml, parse_json, parse_yaml
from cloudai_mbridge.training.credentials.find import is_credential_key
from cloudai_mbridge.training.credentials.scrub import without_users
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.messages import show
from cloudai_mbridge.training.schema.plain import check
from cloudai_mbridge.training.schema.type_forms import Form

T = TypeVar("T")


def to_dict(obj: Any) -> dict[str, Any]:
    """Return `obj` (a config dataclass) as plain data.

    Left out are private fields, computed fields (`init=False`), process fields (`local_rank`) and fields that the
    training loop fills with objects of the running program. A default that has no name in files is left out as well.

    ConfigError: a field holds an object that no file can give back.
    """
    if not is_config(obj):
        raise ConfigError(f"{show(obj)} is not a config object")
    table: dict[str, Any] = encode(obj)
    return table


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """Build a `cls` from plain data; types follow the annotations, an int may stand for a float and nothing else.

    Tables that Megatron-Bridge wrote may have keys that do not exist here: they are dropped, with one warning.

    ConfigError: unknown or missing key, wrong type, or a `_target_` that may not be named.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{cls.__name__}: a table is needed, got {show(data)}")
    catalog = LiveCatalog(cls)
    built: T = check(Form("config", (class_path(cls),)), data, "", catalog)
    if catalog.dropped:
        keys = ", ".join(f"{where} = {show(value)}" for where, value in catalog.dropped.items())
        warn_rank_0(f"keys of Megatron-Bridge that do not exist here were dropped: {keys}")
    return built


def to_yaml(obj: Any, path: str | Path | None = None) -> str:
    """Return `obj` as YAML text, and write it to `path` if given."""
    text = dump_yaml(to_dict(obj))
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def from_yaml(cls: type[T], path: str | Path) -> T:
    """Read a `cls` from a YAML file, or from JSON if the file is called `*.json`.

    ConfigError: an unreadable file, or data that `from_dict` refuses; the message starts with the path.
    """
    parse = parse_json if Path(path).suffix == ".json" else parse_yaml
    try:
        with Path(path).open(encoding="utf-8") as file:
            return from_dict(cls, parse(file.read(MAX_CHARS + 1)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def resolved_yaml(config: ConfigContainer, path: str | Path | None = None) -> str:
    """Return the configuration as YAML, and write it to `path` if given.

    Left out are a key that is set in it, variables that are named like one, user and password in the URL of a service,
    tokens among a tokenizer's options.
    """
    shown = copy.copy(config)
    shown.logger = copy.copy(config.logger)
    shown.logger.comet_api_key = None
    if shown.logger.mlflow_tracking_uri:
        shown.logger.mlflow_tracking_uri = without_users(shown.logger.mlflow_tracking_uri)
    shown.env_vars = {name: value for name, value in config.env_vars.items() if not is_credential_key(name)}
    shown.tokenizer = copy.copy(config.tokenizer)
    options = config.tokenizer.hf_tokenizer_kwargs
    if options:
        shown.tokenizer.hf_tokenizer_kwargs = {k: v for k, v in options.items() if not is_credential_key(k)}
    text: str = shown.to_yaml(path)
    return text
