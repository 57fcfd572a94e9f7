"""`python -m cloudai_mbridge.training.schema` writes `schema.json` from the config classes.

Entries of the installed Megatron-Core release are made anew; the rest is kept.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from cloudai_mbridge.training.compat.versions import RELEASES, installed_release
from cloudai_mbridge.training.config.text.classes import LiveCatalog
from cloudai_mbridge.training.config.text.serialization import encode
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.check import spelled_out
from cloudai_mbridge.training.schema.forms import (
    RELEASES_KEY,
    SCHEMA_FILE,
    Section,
    load_all_releases,
    render,
    without_releases,
)
from cloudai_mbridge.training.schema.known_names import CLASS_PATHS, CONTAINER, ENUMS, PROCESS_FIELDS

# Defaults that depend on the machine that runs the generator
_MACHINE_DEFAULTS = (*PROCESS_FIELDS, "gradient_accumulation_fusion")

Entry = dict[str, Any]


def generate_schema() -> str:
    """Return the file's text, with the entries of this Megatron-Core release; the same on every machine."""
    release = installed_release()
    assert release is not None, "no supported Megatron-Core is installed"
    before, catalog, classes = load_all_releases(), LiveCatalog(object), {}
    for path in sorted(set(CLASS_PATHS.values())):
        section, cls = catalog.section(path), catalog.find_class(path)
        if section is not None and cls is not None:
            earlier = before["classes"].get(path, {}).get("fields", {})
            fresh = _field_entries(section, cls, catalog)
            classes[path] = {
                "bases": [base for base in section.bases if base in CLASS_PATHS.values()],
                "abstract": section.abstract,
                "aliases": dict(section.aliases),
                "fields": merge(earlier, fresh, release) | {name: fresh[name] for name in fresh if _is_ours(cls, name)},
            }
    enums = {path: members for path in ENUMS if (members := dict(catalog.members(path)))}
    schema = {"root": CONTAINER, "classes": classes, "enums": merge(before["enums"], enums, release)}
    return _layout(schema) + "\n"


def _is_ours(cls: type, name: str) -> bool:
    """Return whether a class of this package declares a field that no class of Megatron-Core has: in every release."""
    declaring = [each.__module__ for each in cls.__mro__ if name in vars(each).get("__annotations__", {})]
    return bool(declaring) and all(module.startswith("cloudai_mbridge.") for module in declaring)


def _layout(value: Any, depth: int = 0) -> str:
    """Write JSON with a line per field, so that a change of one key is a change of one line."""
    if depth == 4 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    indent = " " * (depth + 1)
    inner = ",\n".join(f"{indent}{json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items())
    return "{\n" + inner + "\n" + " " * depth + "}"


def _field_entries(section: Section, cls: Any, catalog: LiveCatalog) -> dict[str, Entry]:
    entries = {entry.name: entry for entry in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())}
    found = {}
    for name, form in section.fields.items():
        written: Entry = {"type": render(form), "required": name in section.required}
        if name in section.computed:
            written["computed"] = True
        written.update(_default(name, entries[name]))
        if choices := spelled_out(form, catalog):
            written["choices"] = choices
        found[name] = written
    return found


def _default(name: str, entry: "dataclasses.Field[Any]") -> Entry:
    """Return the default as a file writes it, {} if it has none there or depends on the machine."""
    if name in _MACHINE_DEFAULTS:
        return {}
    if entry.default is MISSING:
        made = entry.default_factory() if entry.default_factory is not MISSING else MISSING
        return {"default": made} if isinstance(made, list | dict) else {}
    try:
        return {"default": encode(entry.default)}
    except ConfigError:
        return {}


def merge(table: Mapping[str, Any], fresh: Mapping[str, Any], release: str) -> dict[str, Any]:
    """Return the entries of `table` with those of one release replaced by `fresh`."""
    keys = [*table, *(key for key in fresh if key not in table)]
    merged = {key: _with(table.get(key), fresh.get(key), release) for key in keys}
    return {key: entry for key, entry in merged.items() if entry}


def _with(entry: Any, fresh: Entry | None, release: str) -> Any:
    """Return the variants of an entry, with `fresh` as the entry of `release`; the entry itself if all are the same."""
    variants = [] if entry is None else entry if isinstance(entry, list) else [{**entry, RELEASES_KEY: list(RELEASES)}]
    spans = [(without_releases(each), {*each[RELEASES_KEY]} - {release}) for each in variants]
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
    return [{**plain, RELEASES_KEY: [each for each in RELEASES if each in found]} for plain, found in spans]


if __name__ == "__main__":
    SCHEMA_FILE.write_text(generate_schema(), encoding="utf-8")
    print(SCHEMA_FILE)
