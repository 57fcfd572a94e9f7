"""Functions of Megatron-Bridge's `recipes` for the recipes that are shipped here."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cloudai_mbridge.training.upstream import missing

_PRETRAIN, _FINETUNE = "_pretrain_config", ("_sft_config", "_peft_config")


class RecipeModule(ModuleType):
    """A module of any family: `NAME_pretrain_config` is there for every recipe NAME that is shipped."""

    def __getattr__(self, name: str) -> Any:
        recipe = name.removesuffix(_PRETRAIN)
        if name.startswith("__") or not name.endswith((_PRETRAIN, *_FINETUNE)):
            raise missing(self.__name__, name)
        from cloudai_mbridge.recipes import recipe_names

        if name.endswith(_PRETRAIN) and recipe in recipe_names():
            return _function(recipe)
        raise ImportError(_line(f"{self.__name__}.{name}", name, recipe_names()))


def _line(full: str, name: str, shipped: list[str]) -> str:
    kind = next(end for end in (_PRETRAIN, *_FINETUNE) if name.endswith(end))
    recipe = name.removesuffix(kind)
    if recipe not in shipped:
        return f"{full} is absent on purpose: the recipes that are shipped are {', '.join(shipped)}"
    return f"{full} is absent on purpose: take {recipe}{_PRETRAIN} and set `dataset`, `peft` and `checkpoint` of it"


def _function(recipe: str) -> Callable[[], Any]:
    def config() -> Any:
        from cloudai_mbridge.recipes import load_recipe
        from cloudai_mbridge.recipes.container import container_data
        from cloudai_mbridge.training.config import ConfigContainer

        return ConfigContainer.from_dict(container_data(load_recipe(recipe).sections))

    config.__name__ = config.__qualname__ = f"{recipe}{_PRETRAIN}"
    config.__doc__ = f"Return the configuration of the recipe {recipe}, on one GPU and with mock data."
    return config
