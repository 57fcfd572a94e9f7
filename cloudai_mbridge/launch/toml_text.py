"""Write TOML that reads back as what was written."""

import json
from collections.abc import Mapping
from typing import Any

import toml


class _Encoder(toml.TomlEncoder):  # type: ignore[misc]
    """toml's encoder with its string writer replaced: that one garbles backslashes and fails on control characters."""

    def __init__(self) -> None:
        super().__init__()
        self.dump_funcs[str] = _quote


def _quote(text: str) -> str:
    """Quote as a basic string; JSON's escapes are TOML's, but TOML also wants U+007F escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def render_toml(data: Mapping[str, Any]) -> str:
    """Render a document whose keys are plain."""
    return str(toml.dumps(data, encoder=_Encoder()))
