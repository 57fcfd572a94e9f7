"""A config class as a table of fields, and where such tables are looked up. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cloudai_mbridge.training.schema.type_forms import Form


@dataclass(frozen=True)
class Field:
    """One key of a config class. `default` holds the plain default, absent ones have `has_default` False."""

    form: Form
    required: bool = False
    computed: bool = False
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True)
class Section:
    """One config class: its path, its fields, second names of fields, and the paths of its base classes."""

    path: str
    fields: Mapping[str, Field]
    aliases: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    abstract: bool = False

    def keys(self) -> list[str]:
        """List what may be set."""
        return [*(name for name, entry in self.fields.items() if not entry.computed), *self.aliases]


class Catalog(Protocol):
    """Where class paths and enum paths are looked up.

    dropped: keys of tables that Megatron-Bridge wrote and no class here has, with their values.
    """

    dropped: dict[str, Any]

    def section(self, path: str) -> Section | None:
        """Return the config class at `path`, None when there is none."""

    def members(self, path: str) -> Mapping[str, Any]:
        """Return name -> value of the enum at `path`."""

    def missing_because(self, path: str, key: str) -> str | None:
        """Say which releases of Megatron-Core have a key that the class at `path` lacks; None: none has it."""

    def is_request(self, path: str, key: str, value: Any) -> bool:
        """Say whether `value` differs from the default of the releases of Megatron-Core that have the key."""


def field_key(section: Section, key: object) -> str | None:
    """Return the name of the field that `key` sets, None when there is none."""
    if not isinstance(key, str):
        return None
    name = section.aliases.get(key, key)
    return name if name in section.fields else None
