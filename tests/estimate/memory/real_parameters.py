"""Shared by the tests of parameters: a recipe in one layout, what is predicted for it, which ranks to compare."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.memory.layout import Implementation, ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import parameters_per_stage
from cloudai_mbridge.estimate.proxy import proxy
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.recipes.apply import with_recipe_defaults

SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """A recipe with fewer layers, of the same shapes, in one layout.

    extra: as a point's `extra_cmd_args`. fields: the recipe's own model table says otherwise; None: it does not say.
    """

    recipe: str
    layers: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vp: int = 1
    layout: str | None = None
    has_q_lora: bool = True
    extra: Mapping[str, str] = field(default_factory=dict, hash=False)
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def world_size(self) -> int:
        expert_ranks = self.ep * (self.etp or self.tp)
        return self.pp * math.lcm(self.tp, expert_ranks)


def recipe_of(case: Case) -> Recipe:
    """The recipe's own layouts are for all of its layers; a proxy of those with other kinds of layers keeps them."""
    recipe = load_recipe(case.recipe)
    if recipe.family in ("nemotronh", "gpt_oss"):
        recipe = proxy(recipe, case.layers)
    model = {name: value for name, value in {**recipe.sections["model"], **case.fields}.items() if value is not None}
    return replace(recipe, sections={**recipe.sections, "model": model}, pipeline_layouts={})


def arguments(case: Case) -> tuple[ResolvedCmdArgs, dict[str, str]]:
    """Return the point that has this layout, and its `extra_cmd_args`."""
    extra = dict(case.extra)
    experts = extra.pop("model.num_moe_experts", None)
    point = {
        "num_moe_experts": experts and int(experts),
        "tp": case.tp,
        "pp": case.pp,
        "ep": case.ep,
        "et": case.etp,
        "vp": case.vp if case.vp > 1 else None,
    }
    point["pipeline_model_parallel_layout"] = case.layout
    args = ResolvedCmdArgs(
        launcher="embedded",
        compute_dtype="fp32",
        max_steps=1,
        mb=1,
        gb=4 * case.world_size,
        num_gpus=case.world_size,
        num_layers=case.layers,
        **{name: value for name, value in point.items() if value is not None},
    )
    return with_recipe_defaults(args, recipe_of(case), but=("gb", "mb")), extra


def predicted(case: Case) -> list[int]:
    """Return the parameters of every stage, of the modules that Megatron-Core has without Transformer Engine."""
    args, extra = arguments(case)
    layout = ParallelLayout(
        num_gpus=case.world_size,
        tp=case.tp,
        pp=case.pp,
        vp=case.vp,
        ep=case.ep,
        etp=case.etp,
        pipeline_layout=case.layout,
        implementation=Implementation.TORCH,
    )
    model = architecture(recipe_of(case), args, extra)
    stages = parameters_per_stage(model if case.has_q_lora else replace(model, q_lora_rank=None), layout)
    return [stage.total for stage in stages]


def ranks(case: Case) -> list[int]:
    """All of a small world; of a bigger one the first and the last of every stage, whose ranks follow each other."""
    size = case.world_size // case.pp
    if case.world_size <= 4:
        return list(range(case.world_size))
    return sorted({stage * size + place for stage in range(case.pp) for place in (0, size - 1)})


def count(chunks: list[Any]) -> tuple[int, int]:
    """Return this rank's stage and the number of parameters that its chunks hold."""
    from megatron.core import parallel_state

    held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return parallel_state.get_pipeline_model_parallel_rank(), held
