"""Settings of fine-tuning recipes that differ from pre-training recipes, and the adapters of LoRA.

Source: Megatron-Bridge 0.6.0, megatron.bridge.recipes.common. Settings of single models are in the tables `sft` and
`lora` of their files.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, ResolvedCmdArgs
from cloudai_mbridge.recipes.load import Recipe, Sections, load_recipe

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
        _add(sections, more)
    return replace(recipe, sections=sections, task=task)


def adapters_of_task(recipe: Recipe) -> Mapping[str, Any]:
    """Return the section `peft` with which a recipe trains adapters."""
    return {**_OF_TASK[LORA]["peft"], **recipe.tasks.get(LORA, {}).get("peft", {})}


def _add(sections: Sections, more: dict[str, dict[str, Any]]) -> None:
    for section, values in more.items():
        sections.setdefault(section, {}).update(values)


def set_adapters(data: dict[str, Any], task: str) -> None:
    """Set the companion settings of adapters: upstream's rank order, and no delayed gradients of frozen weights."""
    if task not in ADAPTER_TASKS:
        return
    if data["model"]["pipeline_model_parallel_size"] > 1 and not data["ddp"].get("use_megatron_fsdp"):
        data.setdefault("dist", {})["use_tp_pp_dp_mapping"] = True
    if overlap := data.get("comm_overlap"):
        overlap.pop("delay_wgrad_compute", None)


def check_adapters(data: Mapping[str, Any], args: ResolvedCmdArgs) -> None:
    """Raise BadInput for adapters without weights to adapt, and for settings of missing adapters."""
    if args.task in ADAPTER_TASKS:
        if not data["checkpoint"].get("pretrained_checkpoint"):
            raise BadInput(f"cmd_args.task = {args.task!r} needs the weights to adapt; set pretrained_checkpoint")
    elif (peft := data.get("peft")) and "_target_" not in peft:
        raise BadInput(f"extra_cmd_args: peft.{next(iter(peft))} has no effect without adapters; set task = 'lora'")
