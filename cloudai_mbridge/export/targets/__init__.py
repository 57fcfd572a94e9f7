"""Targets of an export, a module each, whose name is the target's.

A module has one of two functions: `render(table) -> bytes` returns a file, which `IS_BINARY` keeps from a terminal;
`send(table) -> str` sends to a service, whose own environment variables set address and key, and returns a line.
"""

import pkgutil
from importlib import import_module
from types import ModuleType


def names() -> list[str]:
    """Return the names of the targets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ModuleType:
    """Import a target."""
    return import_module(f"{__name__}.{name}")
