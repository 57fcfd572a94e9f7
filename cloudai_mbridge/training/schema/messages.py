"""Words of config errors: one line, the dotted path first, the remedy last. Standard library only."""

import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from cloudai_mbridge.training.errors import ConfigError

_SHOWN = 80


def fail(where: str, text: str) -> NoReturn:
    """Raise ConfigError with one line: the dotted path and the error."""
    line = re.sub(r"\s+", " ", f"{where or 'config'}: {text}")
    raise ConfigError(line.encode("utf-8", "backslashreplace").decode("utf-8"))


def show(value: object) -> str:
    """Write `value` for a message, cut to a readable length."""
    try:
        text = repr(value)
    except Exception:  # a repr of foreign objects, or of an int too long to print
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nearest(name: object, valid: Iterable[str], what: str = "valid") -> str:
    """Suggest the nearest of `valid`, or list them when none is near."""
    names = list(valid)
    near = difflib.get_close_matches(str(name)[:200], names, 1)
    return f"did you mean {near[0]!r}?" if near else f"{what}: {', '.join(names) or 'none'}"


def join(where: str, key: object) -> str:
    """Append `key` to a dotted path."""
    is_plain = isinstance(key, str) and key.isprintable() and len(key) <= _SHOWN
    text = key if is_plain else show(key)
    return f"{where}.{text}" if where else str(text)


def is_tagged(value: object) -> bool:
    """Return whether `value` is a table with a `_target_`."""
    return isinstance(value, dict) and "_target_" in value
