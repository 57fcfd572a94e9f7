"""Text that is safe to show, and cut to a length; names of tests and points that are safe as file names."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
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


def readable(value: float, digits: int = 4) -> str:
    """Return a positive number with so many digits, and never with an exponent: 59,962, 1.464 or 0.00005336."""
    if value >= 10**digits or value >= 1000:
        return f"{value:,.0f}"
    if 0 < value < 1e-4:
        return f"{value:.{digits - 1 - math.floor(math.log10(value))}f}"
    return f"{value:.{digits}g}"


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


def labels(points: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return names of points, and the coordinates that all of them have in common, "" if the names contain these too.

    If the label of a point is cut, which hides the axes behind the cut, its name is "tp=2,mb=1" with the axes on which
    the points differ.
    """
    names = [label(point) for point in points]
    if len(points) < 2 or not any(map(_is_cut, points)):
        return names, ""
    axes = dict.fromkeys(name for point in points for name in point)
    shared = {name for name in axes if len({json.dumps(point.get(name)) for point in points}) == 1}
    return [_coordinates(point, axes.keys() - shared) for point in points], _coordinates(points[0], shared)


def _is_cut(coordinates: Mapping[str, Any]) -> bool:
    return len(label(coordinates)) > _LONGEST


def _coordinates(point: Mapping[str, Any], names: Set[str]) -> str:
    found = ((name, value) for name, value in point.items() if name in names)
    return ",".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in found)
