"""The configuration of a run as it is written beside its results: readable again, and without keys."""

import copy
from pathlib import Path

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.credentials.find import is_credential_key
from cloudai_mbridge.training.credentials.scrub import without_users


def resolved_yaml(config: ConfigContainer, path: str | Path | None = None) -> str:
    """Return the configuration as YAML, and write it to `path` if given.

    Left out are a key that is set in it, user and password in the URL of a service, tokens among a tokenizer's options.
    """
    shown = copy.copy(config)
    shown.logger = copy.copy(config.logger)
    shown.logger.comet_api_key = None
    if shown.logger.mlflow_tracking_uri:
        shown.logger.mlflow_tracking_uri = without_users(shown.logger.mlflow_tracking_uri)
    shown.tokenizer = copy.copy(config.tokenizer)
    options = config.tokenizer.hf_tokenizer_kwargs
    if options:
        shown.tokenizer.hf_tokenizer_kwargs = {k: v for k, v in options.items() if not is_credential_key(k)}
    text: str = shown.to_yaml(path)
    return text
