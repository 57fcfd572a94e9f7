"""Names and types of every config key, for programs without torch: `schema.json`, and the check against it.

`python -m cloudai_mbridge.training.schema` writes the file anew (this needs torch and Megatron-Core).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.schema.field_table import Field, Section
from cloudai_mbridge.training.schema.known_names import CONTAINER
from cloudai_mbridge.training.schema.messages import fail, show
from cloudai_mbridge.training.schema.plain import check
from cloudai_mbridge.training.schema.type_forms import Form, parse

SCHEMA_FILE = Path(__file__).with_name("schema.json")


@cache
def load_schema() -> dict[str, Any]:
    """Return the schema: `root` (path of the container), `classes` (path -> fields) and `enums` (path -> members)."""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


def check_section_values(data: dict[str, Any], *, partial: bool = False) -> None:
    """Check a config given as plain data, section -> key -> value, as strictly as the training process will.

    `partial` lets keys and sections be missing, as in the overlay of a recipe.

    Raises:
        ConfigError: unknown or missing key, or a wrong type: dotted path, value, and the valid or nearest key.
    """
    if not isinstance(data, dict):
        fail("", f"a table of sections is needed, got {show(data)}")
    check(Form("config", (CONTAINER,)), data, "", _SchemaCatalog(load_schema(), partial))


class _SchemaCatalog:
    """Look classes and enums up in the schema."""

    def __init__(self, schema: Mapping[str, Any], partial: bool) -> None:
        self._classes = schema["classes"]
        self._enums = schema["enums"]
        self._partial = partial
        self.dropped: dict[str, Any] = {}

    def section(self, path: str) -> Section | None:
        entry = self._classes.get(path)
        if entry is None:
            return None
        section = _read_section(path)
        if not self._partial:
            return section
        return replace(section, fields={name: replace(each, required=False) for name, each in section.fields.items()})

    def members(self, path: str) -> Mapping[str, Any]:
        members: Mapping[str, Any] = self._enums.get(path, {})
        return members


@cache
def _read_section(path: str) -> Section:
    entry = load_schema()["classes"][path]
    fields = {
        name: Field(parse(each["type"]), required=each["required"], computed=each.get("computed", False))
        for name, each in entry["fields"].items()
    }
    return Section(path, fields, entry["aliases"], tuple(entry["bases"]), entry["abstract"])
