"""Proxies: recipes with fewer layers of the same shapes, for small machines, and the test definition of one.

Every kind of layer that the model has stays, if there are enough layers for one of each: a proxy of a model
with experts has experts, although the first layers of the model may be dense.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import LAYER_LISTS
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.pipeline_layout import parse_layout
from cloudai_mbridge.models.test_definition import TEMPLATE
from cloudai_mbridge.recipes.load import BLOCKS, Recipe

# Of these the embedding and the loss take the place of a layer each
_STAGE_PLACES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_STAGE_COUNTS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
T = TypeVar("T")


def proxy(recipe: Recipe, num_layers: int) -> Recipe:
    """Return the recipe with this number of decoder layers, the model otherwise unchanged.

    Explicit pipeline layouts are rebuilt if the layers suffice.
    BadInput: fewer than one layer, or more than the recipe has.
    """
    model, before = recipe.sections["model"], int(recipe.sections["model"]["num_layers"])
    if not 1 <= num_layers <= before:
        raise BadInput(f"recipe {recipe.name}: {num_layers} layers do not make a proxy; use 1 to {before}")
    changed = _changed(model, before, num_layers)
    if num_layers < before:
        changed |= {name: False for name in _STAGE_PLACES if model.get(name)}
        changed |= {name: None for name in _STAGE_COUNTS if model.get(name) is not None}
    shrunk = {name: value for name, value in {**model, **changed}.items() if value is not None}
    layouts = recipe.pipeline_layouts
    if num_layers < before:  # for the numbers of stages that the recipe has them for and the layers suffice for
        has_mtp = any("m" in "".join(parse_layout(text)) for text in layouts.values())
        tail = "m" * recipe.mtp_num_layers if has_mtp else ""
        counts = [int(text) for text in layouts if int(text) <= num_layers]
        layouts = {str(stages): pipeline_layout(num_layers, stages, tail) for stages in counts}
    sections = {**recipe.sections, "model": {**shrunk, "num_layers": num_layers}}
    return replace(recipe, sections=sections, pipeline_layouts=layouts)


def _changed(model: dict[str, Any], before: int, num_layers: int) -> dict[str, Any]:
    """Return the lists and the pattern of as many layers; the entries of prediction layers, after them, are kept."""
    changed: dict[str, Any] = {}
    for name in LAYER_LISTS:
        if isinstance(entries := model.get(name), list):
            changed[name] = [*choose(entries[:before], num_layers), *entries[before:]]
    if isinstance(freq := model.get("moe_layer_freq"), int) and num_layers <= freq < before:  # not even one of experts
        changed["moe_layer_freq"] = choose([int(i % freq == 0) for i in range(before)], num_layers)
    if pattern := model.get("hybrid_layer_pattern"):
        decoder, *prediction = pattern.split("/")
        blocks = choose([block for block in decoder if block in BLOCKS], num_layers)
        changed["hybrid_layer_pattern"] = "/".join(["".join(blocks), *prediction])
    return changed


def choose(entries: Sequence[T], count: int) -> list[T]:
    """Return as many of the entries, in order: every kind in proportion, and at least once if there is room."""
    kinds = Counter(entries)
    if count >= len(entries):
        return list(entries)
    shares = {kind: count * number / len(entries) for kind, number in kinds.items()}
    quota = {kind: max(1, int(share)) for kind, share in shares.items()}
    while sum(quota.values()) > count:  # the rarest goes first if a kind has one, else the kind furthest above
        most = max(quota, key=lambda kind: (quota[kind] > 1, quota[kind] - shares[kind]))
        quota[most] -= 1
    while sum(quota.values()) < count:
        quota[max(quota, key=lambda kind: (quota[kind] < kinds[kind], shares[kind] - quota[kind]))] += 1
    chosen = []
    for entry in entries:
        if quota[entry] > 0:
            quota[entry] -= 1
            chosen.append(entry)
    return chosen


def pipeline_layout(num_layers: int, stages: int, tail: str = "") -> str:
    """Return a layout of layers over stages, spare layers in the middle, away from embedding and loss."""
    each, spare = divmod(num_layers, stages)
    sizes = [each] * stages
    for index in sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))[:spare]:
        sizes[index] += 1
    text = "|".join("t" * size for size in sizes)
    return f"E{text}{tail}L"


# Sequences of a step per rank: enough micro-batches for a steady step, few enough for a small machine
_SEQUENCES = 4


def render_proxy(recipe: Recipe, num_layers: int, num_gpus: int, max_steps: int) -> str:
    """Return the TOML of a test: the recipe's shapes with fewer layers, for the embedded loop if it can build it.

    BadInput as for `proxy`.
    """
    small, micro_batch_size = proxy(recipe, num_layers), recipe.default("train", "micro_batch_size") or 1
    model, shrunk = recipe.sections["model"], small.sections["model"]
    names = (model.keys() | shrunk.keys()) - {"num_layers"}
    changed = {name: shrunk.get(name) for name in names if shrunk.get(name) != model.get(name)}  # None: absent
    cmd_args = {
        "launcher": str(Launcher.MEGATRON_BRIDGE if recipe.not_embedded else Launcher.EMBEDDED),
        "model_family_name": recipe.family,
        "model_recipe_name": recipe.name,
        "num_layers": num_layers,
        "num_gpus": num_gpus,
        "mb": micro_batch_size,
        "gb": num_gpus * _SEQUENCES * micro_batch_size,
        "max_steps": max_steps,
        "compute_dtype": "bf16",
    }
    definition: dict[str, Any] = {
        "name": f"{recipe.name}_{num_layers}_layers",
        "description": f"{recipe.name} with {num_layers} of {recipe.default('model', 'num_layers')} layers",
        "test_template_name": TEMPLATE,
        "metrics": {"warmup_steps": min(3, max_steps - 1)},
        "cmd_args": cmd_args,
    }
    if changed:
        definition["extra_cmd_args"] = {
            f"model.{key}": value if isinstance(value, str) else json.dumps(value)
            for key, value in sorted(changed.items())
        }
    remarks = "".join(f"# {line}\n" for line in _remarks(recipe, small, changed))
    return remarks + render_toml(definition)


def _remarks(recipe: Recipe, small: Recipe, changed: Iterable[str]) -> list[str]:
    layers = f"{small.default('model', 'num_layers')} of its {recipe.default('model', 'num_layers')} layers"
    remarks = [
        f"A proxy of {recipe.name}: {layers}, of the same shapes.",
        *(f"model.{name} is shrunk with them." for name in sorted(changed)),
    ]
    for stages, text in small.pipeline_layouts.items():
        remarks.append(f'With {stages} pipeline stages: pipeline_model_parallel_layout = "{text}"')
    if recipe.not_embedded:
        remarks.append(f"The embedded loop cannot build {recipe.not_embedded}; Megatron-Bridge's launcher runs it.")
    return [
        *remarks,
        f"gb is {_SEQUENCES} micro-batches a rank, not the recipe's; set tp, pp, ep and seq_length as needed.",
    ]
