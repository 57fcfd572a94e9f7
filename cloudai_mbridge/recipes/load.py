"""Find and read recipes, for pre-training and for fine-tuning.

Settings of fine-tuning recipes that differ from pre-training recipes, and the adapters of LoRA: from Megatron-Bridge
0.6.0, megatron.bridge.recipes.common. Settings of single models are in the tables `sft` and `lora` of their files.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS
from cloudai_mbridge.models.toml_source import suggest

_HEAD = ("description", "family", "source", "not_embedded", "mtp_num_layers", "pipeline_layouts")
_DATA = resources.files("cloudai_mbridge.recipes") / "data"

Sections = dict[str, dict[str, Any]]
Block = Mapping[str, Any]

LORA = "lora"
_SHARED: Sections = {"optimizer": {"min_lr": 0.0, "adam_beta2": 0.98}, "rng": {"seed": 5678}}
_OF_TASK: dict[str, Sections] = {
    "sft": {"optimizer": {"lr": 5e-6}},
    LORA: {
        "optimizer": {"lr": 1e-4},
        "peft": {
            "_target_": "cloudai_mbridge.training.peft.config.LoRA",
            "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            "dim": 32,
            "alpha": 32,
        },
    },
}
# Layers of hybrid models in a pattern: see docs/training.md
BLOCKS = "M*-EG"


@dataclass(frozen=True)
class Recipe:
    """An architecture with training defaults; `sections` are those of the training config.

    not_embedded: parts of the model that the embedded loop cannot build, or "".
    mtp_num_layers: multi-token-prediction layers of the upstream recipe.
    pipeline_layouts: the explicit layout that the upstream recipe uses for a number of pipeline stages (pp * vp).
    blocks: settings of upstream's presets; `recipes.presets` reads them.
    task: of `sections`; those of fine-tuning are made from `tasks`.
    base, chosen, own: if `sections` are of one preset, the recipe without it, its blocks and its own arguments.
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
    task: str = "pretrain"
    tasks: Mapping[str, Sections] = field(default_factory=dict)
    base: "Recipe | None" = None
    chosen: tuple[Block, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    __hash__ = object.__hash__  # sections cannot be hashed; for caches, the same recipe is the same object

    def default(self, section: str, field: str) -> Any:
        """Return the recipe's value of a training-config field, or None."""
        return self.sections.get(section, {}).get(field)


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
    tasks = {task: data.pop(task) for task in _OF_TASK if task in data}
    return Recipe(name=name, sections=data, blocks=blocks, tasks=tasks, **head)


def one_name(task: str) -> str:
    """Return a task's name in `Recipe.task` and `[[preset]]` blocks: "peft" is LoRA."""
    return LORA if task in ADAPTER_TASKS else task


def recipe_for(name: str, task: str) -> Recipe:
    """Return a recipe for a task, always the same object. BadInput: unknown recipe.

    A task without its own sections, or an unknown task, uses the sections for pre-training.
    """
    return _recipe_for(name, one_name(task)) if one_name(task) in _OF_TASK else load_recipe(name)


@cache
def _recipe_for(name: str, task: str) -> Recipe:
    recipe = load_recipe(name)
    sections = {section: dict(values) for section, values in recipe.sections.items()}
    for more in (_SHARED, _OF_TASK[task], recipe.tasks.get(task, {})):
        for section, values in more.items():
            sections.setdefault(section, {}).update(values)
    return replace(recipe, sections=sections, task=task)


def adapters_of_task(recipe: Recipe) -> Mapping[str, Any]:
    """Return the section `peft` with which a recipe trains adapters."""
    return {**_OF_TASK[LORA]["peft"], **recipe.tasks.get(LORA, {}).get("peft", {})}


def fit_pattern(pattern: str, layers: int, mtp: int) -> str:
    """Return a pattern of this many decoder layers, followed by this many blocks of multi-token prediction.

    A longer pattern repeats from its beginning. `|` between pipeline stages is kept if the number of layers is.
    """
    whole, *prediction = pattern.split("/")
    blocks = [block for block in whole if block in BLOCKS]
    if blocks and len(blocks) != layers:
        whole = "".join((blocks * (layers // len(blocks) + 1))[:layers])
    return "/".join([whole, *(prediction * mtp)[:mtp]])
