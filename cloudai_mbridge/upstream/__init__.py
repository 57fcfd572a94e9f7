"""Modules of Megatron-Bridge outside `training`, under this package's name, for scripts with renamed imports.

`tables` maps served names to their modules; `training.upstream` lists the missing modules, with reasons. A
module of this package precedes a Megatron-Bridge module with the same name.
"""

import sys
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]


class _Finder:
    """Finder and loader of modules of this package without a file. It is the last finder, so that files win."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a served module, or None. Raises ModuleNotFoundError: absent on purpose."""
        package, _, below = name.partition(".")
        if package != _PACKAGE or not below:
            return None
        from cloudai_mbridge.upstream.served import spec_of

        return spec_of(name, below, self)

    def create_module(self, spec: Any) -> Any:
        from cloudai_mbridge.upstream.served import module_of

        return module_of(spec)

    def exec_module(self, module: Any) -> None:
        """Do nothing: a name is imported on first access."""


def install() -> None:
    """Serve the modules from now on; nothing is imported before their first import."""
    sys.meta_path.append(_Finder())
