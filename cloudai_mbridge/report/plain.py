"""Values as JSON can hold them."""

import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

_AS_THEY_ARE = (int, bool, type(None))
# Halves of characters: JSON can write them, and strict readers refuse them
_SURROGATE = re.compile("[\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Return plain data: dataclasses as objects, and numbers that are not finite as "nan", "inf" or "-inf".

    Lone surrogates in texts are spelt out, such as \\ud800.
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if kind in _AS_THEY_ARE:  # most values: a report may have millions
        return value
    if isinstance(value, str):
        return _text(value)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _text(value: str) -> str:
    """Return a text, or that of an enumeration's member."""
    text = str(value)
    return text if text.isascii() else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
