"""Names of tests and points that are readable, stable, and safe as directory and job names."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_LONGEST = 80


def slug(text: str) -> str:
    """Return `text` if it is a safe file name, else its safe characters and a hash of the whole."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:_LONGEST]
    return text if safe == text and text else f"{safe or 'x'}-{_digest(text)}"


def label(coordinates: Mapping[str, Any]) -> str:
    """Name a point after its coordinates: {"tp": 2, "mb": 1} is "tp2-mb1"; without any it is "single"."""
    if not coordinates:
        return "single"
    text = "-".join(
        f"{name}{value if isinstance(value, str) else json.dumps(value)}" for name, value in coordinates.items()
    )
    ambiguous = any(
        isinstance(value, str) and not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII) for value in coordinates.values()
    )
    return f"{slug(text)}-{_digest(json.dumps(coordinates))}" if ambiguous else slug(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
