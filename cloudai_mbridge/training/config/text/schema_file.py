"""Generate `schema.json` from the config classes: the entries of the installed Megatron-Core release; the rest is
kept."""

import dataclasses
import json
from dataclasses import MISSING
from typing import Any

from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.config.text.decode import LiveCatalog
from cloudai_mbridge.training.config.text.encode import encode
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.known_names import CLASS_PATHS, CONTAINER, ENUMS, PROCESS_FIELDS
from cloudai_mbridge.training.schema.plain import spelled_out
from cloudai_mbridge.training.schema.releases import SCHEMA_FILE, load_all_releases, merge
from cloudai_mbridge.training.schema.type_forms import Section, render

# Defaults that depend on the machine that runs the generator
_MACHINE_DEFAULTS = (*PROCESS_FIELDS, "gradient_accumulation_fusion")


def generate_schema() -> str:
    """Return the file's text, with the entries of this Megatron-Core release; the same on every machine."""
    release = installed_release()
    assert release is not None, "no supported Megatron-Core is installed"
    catalog = LiveCatalog(object)
    paths = sorted(set(CLASS_PATHS.values()))
    classes = {path: _class_entry(path, catalog) for path in paths if catalog.find_class(path) is not None}
    enums = {path: members for path in ENUMS if (members := dict(catalog.members(path)))}
    fresh = {"root": CONTAINER, "classes": classes, "enums": enums}
    return _layout(merge(load_all_releases(), fresh, release)) + "\n"


def _layout(value: Any, depth: int = 0) -> str:
    """Write JSON with a line per field, so that a change of one key is a change of one line."""
    if depth == 4 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    indent = " " * (depth + 1)
    inner = ",\n".join(f"{indent}{json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items())
    return "{\n" + inner + "\n" + " " * depth + "}"


def _class_entry(path: str, catalog: LiveCatalog) -> dict[str, Any]:
    section, cls = catalog.section(path), catalog.find_class(path)
    assert section is not None
    assert cls is not None
    entries = {entry.name: entry for entry in (dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ())}
    return {
        "bases": [base for base in section.bases if base in CLASS_PATHS.values()],
        "abstract": section.abstract,
        "aliases": dict(section.aliases),
        "fields": {name: _field_entry(name, entries[name], section, catalog) for name in section.fields},
    }


def _field_entry(name: str, entry: "dataclasses.Field[Any]", section: Section, catalog: LiveCatalog) -> dict[str, Any]:
    described = section.fields[name]
    written: dict[str, Any] = {"type": render(described.form), "required": described.required}
    if described.computed:
        written["computed"] = True
    written.update(_default(name, entry))
    if choices := spelled_out(described.form, catalog):
        written["choices"] = choices
    return written


def _default(name: str, entry: "dataclasses.Field[Any]") -> dict[str, Any]:
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


if __name__ == "__main__":
    SCHEMA_FILE.write_text(generate_schema(), encoding="utf-8")
    print(SCHEMA_FILE)
