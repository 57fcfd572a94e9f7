"""The configuration of a run as it is written beside its results: readable again, and without keys."""

import copy
import re
from pathlib import Path

from cloudai_mbridge.training.config.container import ConfigContainer

SECRET_NAME = re.compile(r"(^|_)(api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
USER_IN_URL = re.compile(r"(\w://)[^/@\s]+@")


def resolved_yaml(config: ConfigContainer, path: str | Path | None = None) -> str:
    """Return the configuration as YAML, and write it to `path` if given.

    Left out are a key that is set in it, user and password in the URL of a service, tokens among a tokenizer's options.
    """
    shown = copy.copy(config)
    shown.logger = copy.copy(config.logger)
    shown.logger.comet_api_key = None
    if shown.logger.mlflow_tracking_uri:
        shown.logger.mlflow_tracking_uri = USER_IN_URL.sub(r"\1", shown.logger.mlflow_tracking_uri)
    shown.tokenizer = copy.copy(config.tokenizer)
    options = config.tokenizer.hf_tokenizer_kwargs
    if options:
        shown.tokenizer.hf_tokenizer_kwargs = {k: v for k, v in options.items() if not SECRET_NAME.search(k)}
    text: str = shown.to_yaml(path)
    return text
