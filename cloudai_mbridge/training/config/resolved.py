"""The configuration of a run as it is written beside its results: readable again, and without keys."""

import copy
from pathlib import Path

from cloudai_mbridge.training.config.container import ConfigContainer


def resolved_yaml(config: ConfigContainer, path: str | Path | None = None) -> str:
    """Return the configuration as YAML, and write it to `path` if given. A key that is set in it is left out."""
    shown = copy.copy(config)
    shown.logger = copy.copy(config.logger)
    shown.logger.comet_api_key = None
    text: str = shown.to_yaml(path)
    return text
