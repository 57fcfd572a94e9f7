"""Names and types of every config key, for programs without torch: `schema.json`, and the check against it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from cloudai_mbridge.training.schema.known_names import CONTAINER
from cloudai_mbridge.training.schema.messages import fail, show
from cloudai_mbridge.training.schema.plain import check
from cloudai_mbridge.training.schema.releases import Catalog, load_all_releases, of_release
from cloudai_mbridge.training.schema.type_forms import Field, Form, Section, parse


@cache
def load_schema(release: str | None = None) -> dict[str, Any]:
    """Return the schema: `root` (path of the container), `classes` (path -> fields) and `enums` (path -> members).

    release: of Megatron-Core, such as "0.19"; None: every key of any release.
    """
    return of_release(load_all_releases(), release)


def check_section_values(data: dict[str, Any], *, partial: bool = False, release: str | None = None) -> None:
    """Check a config given as plain data, section -> key -> value, as strictly as the training process will.

    partial: keys and sections may be missing, as in the overlay of a recipe.
    release: of the Megatron-Core that will train; None if unknown: keys of any release pass.

    ConfigError: unknown or missing key, or a wrong type: dotted path, value, and the valid or nearest key.
    """
    if not isinstance(data, dict):
        fail("", f"a table of sections is needed, got {show(data)}")
    check(Form("config", (CONTAINER,)), data, "", _SchemaCatalog(release, partial))


class _SchemaCatalog(Catalog):
    """Look classes and enums up in the schema."""

    def __init__(self, release: str | None, partial: bool) -> None:
        super().__init__(release)
        self._partial = partial

    def section(self, path: str) -> Section | None:
        if path not in load_schema(self._release)["classes"]:
            return None
        section = _read_section(path, self._release)
        if not self._partial:
            return section
        return replace(section, fields={name: replace(each, required=False) for name, each in section.fields.items()})

    def members(self, path: str) -> Mapping[str, Any]:
        members: Mapping[str, Any] = load_schema(self._release)["enums"].get(path, {})
        return members

    def make(self, form: Form, value: Any, where: str) -> Any:
        return value


@cache
def _read_section(path: str, release: str | None) -> Section:
    entry = load_schema(release)["classes"][path]
    fields = {
        name: Field(parse(each["type"]), required=each["required"], computed=each.get("computed", False))
        for name, each in entry["fields"].items()
    }
    return Section(path, fields, entry["aliases"], tuple(entry["bases"]), entry["abstract"])
