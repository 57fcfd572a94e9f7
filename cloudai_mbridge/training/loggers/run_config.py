"""The run's configuration as the services show it: without secrets."""

from typing import Any

from cloudai_mbridge.training.config.resolved import SECRET_NAME, USER_IN_URL

_HIDDEN = "***"


def run_config(cfg: Any) -> dict[str, Any]:
    """Return the configuration as plain data, with secrets masked by name, and user and password cut out of URLs."""
    masked = _mask(cfg.to_dict())
    assert isinstance(masked, dict)
    return masked


def _mask(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item, name) for item in value]
    if isinstance(value, str):
        return _HIDDEN if value and SECRET_NAME.search(name) else USER_IN_URL.sub(rf"\1{_HIDDEN}@", value)
    return value


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return one level of dotted names, as services show parameters."""
    items: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        items.update(flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value})
    return items
