"""`schema.json` with several releases of Megatron-Core: an entry that is the same in all is stored once, any other as a
list of entries, each with its "releases"."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.versions import RELEASES
from cloudai_mbridge.training.schema.type_forms import Form, Section, options_of, parse, render, union

SCHEMA_FILE = Path(__file__).with_name("schema.json")
_KEY = "releases"

Entry = dict[str, Any]


@cache
def load_all_releases() -> dict[str, Any]:
    """Return the file's content."""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


class Catalog(ABC):
    """Lookup of class paths and enum paths.

    dropped: keys of tables that Megatron-Bridge wrote and no class here has, with their values.
    """

    def __init__(self, release: str | None) -> None:
        """Begin empty. release: of the Megatron-Core that trains, or its version; None: unknown."""
        self._release = release
        self.dropped: dict[str, Any] = {}

    @abstractmethod
    def section(self, path: str) -> Section | None:
        """Return the config class at `path`, None if missing."""

    @abstractmethod
    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`."""

    @abstractmethod
    def make(self, form: Form, value: Any, where: str) -> Any:
        """Return the object of the checked `value`; items of lists and tables are made already."""

    def missing_because(self, path: str, key: str) -> str | None:
        """Describe the Megatron-Core releases with a key that the class at `path` lacks; None: no release has it."""
        return why_missing(load_all_releases(), path, key, self._release)

    def is_request(self, path: str, key: str, value: Any) -> bool:
        """Return whether other releases have the key, and `value` is not the default in any of them."""
        if _who_has(load_all_releases(), path, key) is None:
            return False
        variants = load_all_releases()["classes"][path]["fields"][key]
        return value not in [variant["default"] for variant in variants if "default" in variant]


def of_release(schema: Mapping[str, Any], release: str | None) -> dict[str, Any]:
    """Return the schema of one release; None: every key, and every value, of any release."""
    classes = {
        path: {**entry, "fields": _chosen(entry["fields"], release)} for path, entry in schema["classes"].items()
    }
    return {**schema, "classes": classes, "enums": _chosen(schema["enums"], release)}


def merge(schema: Mapping[str, Any], fresh: Mapping[str, Any], release: str) -> dict[str, Any]:
    """Return `schema` with the entries of one release replaced by `fresh`."""
    before = schema["classes"]
    classes = {
        path: {**entry, "fields": _merged(before.get(path, {}).get("fields", {}), entry["fields"], release)}
        for path, entry in fresh["classes"].items()
    }
    return {**fresh, "classes": classes, "enums": _merged(schema["enums"], fresh["enums"], release)}


def why_missing(schema: Mapping[str, Any], path: str, key: str, used: str | None) -> str | None:
    """Describe the releases with a field that `used`, the release that trains, lacks; None if no release has it."""
    having = _who_has(schema, path, key)
    return having and f"needs Megatron-Core {having}, and {used} trains here; remove it, or change the release"


def _who_has(schema: Mapping[str, Any], path: str, key: str) -> str | None:
    entry = schema["classes"].get(path, {}).get("fields", {}).get(key)
    if not isinstance(entry, list):
        return None
    having = [release for release in RELEASES if any(release in variant[_KEY] for variant in entry)]
    if having[-1] == RELEASES[-1]:
        return f"{having[0]} or newer"
    return f"{having[-1]} or older" if having[0] == RELEASES[0] else ", ".join(having)


def _chosen(table: Mapping[str, Any], release: str | None) -> dict[str, Any]:
    found = {key: _variant(entry, release) for key, entry in table.items()}
    return {key: entry for key, entry in found.items() if entry is not None}


def _variant(entry: Any, release: str | None) -> Entry | None:
    if not isinstance(entry, list):
        plain: Entry = entry
        return plain
    if release is None:
        return _of_any(entry)
    fitting = [variant for variant in entry if release in variant[_KEY]]
    return {key: value for key, value in fitting[-1].items() if key != _KEY} if fitting else None


def _of_any(variants: list[Entry]) -> Entry:
    """Return a field that accepts values of any release, with the newest default; or the members of all releases."""
    joined = {key: value for variant in variants for key, value in variant.items() if key != _KEY}
    if "type" not in joined:  # an enum
        return joined
    options = [option for variant in variants for option in options_of(parse(variant["type"]))]
    values = tuple(dict.fromkeys(value for option in options if option.kind == "literal" for value in option.args))
    forms = tuple(option for option in options if option.kind != "literal")
    joined["type"] = render(union((Form("literal", values), *forms) if values else forms))
    joined["required"] = all(variant["required"] for variant in variants)
    if "choices" in joined:
        joined["choices"] = list(dict.fromkeys(each for variant in variants for each in variant.get("choices", ())))
    return joined


def _merged(table: Mapping[str, Any], fresh: Mapping[str, Any], release: str) -> dict[str, Any]:
    keys = [*table, *(key for key in fresh if key not in table)]
    merged = {key: _with(table.get(key), fresh.get(key), release) for key in keys}
    return {key: entry for key, entry in merged.items() if entry}


def _with(entry: Any, fresh: Entry | None, release: str) -> Any:
    """Return the variants of an entry, with `fresh` as the entry of `release`; the entry itself if all are the same."""
    variants = [] if entry is None else entry if isinstance(entry, list) else [{**entry, _KEY: list(RELEASES)}]
    spans = [({k: v for k, v in each.items() if k != _KEY}, {*each[_KEY]} - {release}) for each in variants]
    if fresh is not None:
        same = next((releases for plain, releases in spans if plain == fresh), None)
        if same is None:
            spans.append((fresh, {release}))
        else:
            same.add(release)
    spans = sorted(
        ((plain, found) for plain, found in spans if found), key=lambda span: max(map(RELEASES.index, span[1]))
    )
    if len(spans) == 1 and spans[0][1] == {*RELEASES}:
        return spans[0][0]
    return [{**plain, _KEY: [each for each in RELEASES if each in found]} for plain, found in spans]
