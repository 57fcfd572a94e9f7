"""Make the modules of `upstream.tables`."""

from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

from cloudai_mbridge.training.upstream import ServedModule, refusal
from cloudai_mbridge.upstream.recipes import RecipeModule
from cloudai_mbridge.upstream.tables import FAMILIES, MODULES


def spec_of(full_name: str, below: str) -> ModuleSpec | None:
    """Return the spec of a module, None if no table has it. Raises ModuleNotFoundError: absent on purpose."""
    top, _, rest = below.partition(".")
    if below in MODULES or (top == "recipes" and rest.partition(".")[0] in FAMILIES):
        return ModuleSpec(full_name, _Loader(), is_package=True)
    if line := refusal(full_name):
        raise ModuleNotFoundError(line)  # with a name, `from package import module` would hide the line
    return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, _, below = spec.name.partition(".")
        if below not in MODULES:
            return RecipeModule(spec.name)
        return ServedModule(spec.name, homes_in(package, MODULES[below]))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a name is imported on first access."""


def homes_in(package: str, homes: Mapping[str, str]) -> dict[str, str]:
    """Return the table with the full names of homes."""
    return {f"{package}.{home}": names for home, names in homes.items()}
