"""Configurations and checkpoints that cannot be used: the errors, and the words of their messages.

A message is one line: the dotted path first, the remedy last. Standard library only.
"""

import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

_SHOWN = 80


class ConfigError(ValueError):
    """A configuration file or an override that cannot be read; the message names the file or key and the remedy."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, found, read or fitted into this run; the message starts with its path."""


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
