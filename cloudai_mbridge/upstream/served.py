"""Make the modules of `upstream.tables`, and the functions of Megatron-Bridge's `recipes` that are shipped here."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from cloudai_mbridge.training.upstream import missing, refusal, served_module
from cloudai_mbridge.upstream.tables import FAMILIES, MODULES

_PRETRAIN, _FINETUNE = "_pretrain_config", ("_sft_config", "_peft_config")


def _recipe_function(module: str, name: str) -> Callable[[], Any]:
    """Return `NAME_pretrain_config` of a module of any family: it is there for every recipe NAME that is shipped."""
    recipe = name.removesuffix(_PRETRAIN)
    if name.startswith("__") or not name.endswith((_PRETRAIN, *_FINETUNE)):
        raise missing(module, name)
    from cloudai_mbridge.recipes import recipe_names

    if name.endswith(_PRETRAIN) and recipe in recipe_names():
        return _function(recipe)
    recipe = name.removesuffix(next(end for end in (_PRETRAIN, *_FINETUNE) if name.endswith(end)))
    if recipe not in recipe_names():
        remedy = f"the recipes that are shipped are {', '.join(recipe_names())}"
    else:
        remedy = f"take {recipe}{_PRETRAIN} and set `dataset`, `peft` and `checkpoint` of it"
    raise ImportError(f"{module}.{name} is absent on purpose: {remedy}")


def _function(recipe: str) -> Callable[[], Any]:
    def config() -> Any:
        from cloudai_mbridge.recipes import load_recipe
        from cloudai_mbridge.recipes.container import container_data
        from cloudai_mbridge.training.config import ConfigContainer

        return ConfigContainer.from_dict(container_data(load_recipe(recipe).sections))

    config.__name__ = config.__qualname__ = f"{recipe}{_PRETRAIN}"
    config.__doc__ = f"Return the configuration of the recipe {recipe}, on one GPU and with mock data."
    return config


def spec_of(full_name: str, below: str, loader: Any) -> ModuleSpec | None:
    """Return the spec of a module, None if no table has it. Raises ModuleNotFoundError: absent on purpose."""
    top, _, rest = below.partition(".")
    if below in MODULES or (top == "recipes" and rest.partition(".")[0] in FAMILIES):
        return ModuleSpec(full_name, loader, is_package=True)
    if line := refusal(full_name):
        raise ModuleNotFoundError(line)  # with a name, `from package import module` would hide the line
    return None


def module_of(spec: ModuleSpec) -> ModuleType:
    """Return the module of a spec, which imports a name on first access."""
    package, _, below = spec.name.partition(".")
    if below not in MODULES:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = partial(_recipe_function, spec.name)  # of a module, for names it lacks
        return module
    return served_module(spec.name, homes_in(package, MODULES[below]))


def homes_in(package: str, homes: Mapping[str, str]) -> dict[str, str]:
    """Return the table with the full names of homes."""
    return {f"{package}.{home}": names for home, names in homes.items()}
