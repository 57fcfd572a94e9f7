"""Values as JSON can hold them."""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

_AS_THEY_ARE = (str, int, bool, type(None))


def plain(value: Any) -> Any:
    """Return plain data: dataclasses as objects, and numbers that are not finite as "nan", "inf" or "-inf"."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if kind in _AS_THEY_ARE:  # most values: a report may have millions
        return value
    if isinstance(value, str):
        return str(value)  # a member of an enumeration
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
