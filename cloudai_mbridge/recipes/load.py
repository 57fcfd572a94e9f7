"""Find and read recipes."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.toml_source import suggest

_HEAD = ("description", "family", "source", "not_embedded", "mtp_num_layers", "pipeline_layouts")
_TASKS = ("sft", "lora")
_DATA = resources.files("cloudai_mbridge.recipes") / "data"

Sections = dict[str, dict[str, Any]]
Block = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """An architecture with training defaults; `sections` are those of the training config.

    not_embedded: parts of the model that the embedded loop cannot build, or "".
    mtp_num_layers: multi-token-prediction layers of the upstream recipe.
    pipeline_layouts: the explicit layout that the upstream recipe uses for a number of pipeline stages (pp * vp).
    blocks: settings of upstream's presets; `recipes.presets` reads them.
    chosen: the source of `sections` if they are of one preset.
    task: of `sections`; `recipes.tasks` makes the sections of fine-tuning from `tasks`.
    """

    name: str
    description: str
    family: str
    source: str
    sections: Sections
    not_embedded: str = ""
    mtp_num_layers: int = 0
    pipeline_layouts: dict[str, str] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    chosen: "Chosen | None" = None
    task: str = "pretrain"
    tasks: Mapping[str, Sections] = field(default_factory=dict)

    def default(self, section: str, field: str) -> Any:
        """Return the recipe's value of a training-config field, or None."""
        return self.sections.get(section, {}).get(field)


@dataclass(frozen=True)
class Chosen:
    """A preset's settings. recipe: without them. own: the preset's own arguments."""

    recipe: Recipe
    blocks: tuple[Block, ...]
    own: Mapping[str, Any]


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(item.name.removesuffix(".toml") for item in _DATA.iterdir() if item.name.endswith(".toml"))


@cache
def load_recipe(name: str) -> Recipe:
    """Read a recipe by name; BadInput, which suggests the nearest names, if it does not exist."""
    if name not in recipe_names():
        raise BadInput(f"cmd_args.model_recipe_name: unknown recipe {name!r}; {suggest(name, recipe_names())}")
    data = tomllib.loads((_DATA / f"{name}.toml").read_text(encoding="utf-8"))
    head = {key: data.pop(key) for key in _HEAD if key in data}
    blocks = tuple(data.pop("preset", ()))
    tasks = {task: data.pop(task) for task in _TASKS if task in data}
    return Recipe(name=name, sections=data, blocks=blocks, tasks=tasks, **head)
