"""Text that is safe to show, and cut to a length; names of tests and points that are safe as file names."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

# Controls except tab and line feed, lone surrogates, non-characters, and the marks that reorder text around them
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
LONGEST = 2000


def visible(text: str) -> str:
    """Return the text with unprintable characters escaped, such as \\x1b. The result is valid in XML 1.0."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _INVISIBLE.sub(escaped, text)


def clipped(text: str, longest: int = LONGEST) -> str:
    """Return the text, or its beginning and the number of omitted characters."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text) - longest} more characters)"


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
