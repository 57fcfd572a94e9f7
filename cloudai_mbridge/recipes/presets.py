"""Settings of upstream's performance recipes other than launcher arguments, by GPU, number format, variant and size.

A `[[preset]]` of a recipe's file is a block of such settings: sections of a training config, and

- `task`: the list of its presets' tasks; default: pre-training.
- `of`: its presets, such as "gb200 fp8_mx", "gb300 fp8_mx large_scale" or "h100 bf16 - 64". Words are patterns, omitted
  words match all; without `of` the block applies to all presets.
- `with`: arguments on whose preset values the block depends: if one is changed, the block is dropped.
- `unset`: fields that the preset leaves empty.

Source: the containers of Megatron-Bridge 0.6.0's launcher. `make interop` compares them with ours.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

from cloudai_mbridge.megatron_bridge.presets.find import Preset
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs, names_in
from cloudai_mbridge.recipes.load import Block, Chosen, Recipe, Sections
from cloudai_mbridge.recipes.tasks import one_name, recipe_for
from cloudai_mbridge.recipes.user_buffers import user_buffers
from cloudai_mbridge.training.compat.machine import GPU
from cloudai_mbridge.training.schema.forms import load_schema, options_of, parse
from cloudai_mbridge.training.schema.known_names import CONTAINER
from cloudai_mbridge.training.schema.not_done import NEEDS

_HEAD = ("of", "with", "unset", "task")
_TASKS = ("pretrain",)
_WORDS = 4  # GPU, number format, variant, GPUs of the job
_OFF: tuple[Any, ...] = ("", "none", "None", [])
_NEEDS = {**NEEDS, "model.moe_flex_dispatcher_backend": (GPU, (None,))}


@dataclass(frozen=True)
class _Trained:
    recipe: str
    task: str
    label: str
    own: Mapping[str, Any] = field(compare=False)


def with_preset_of(recipe: Recipe, preset: Preset | None) -> Recipe:
    """Return the recipe with its blocks for a preset of the embedded loop: the same object for the same preset."""
    if preset is None or not recipe.blocks:
        return recipe
    row = preset.row
    label = f"{row.gpu} {row.compute_dtype} {row.variant or '-'} {row.num_gpus}"
    return _with_blocks(_Trained(recipe.name, one_name(row.task), label, preset.values))


@lru_cache(maxsize=4096)
def _with_blocks(trained: _Trained) -> Recipe:
    recipe = recipe_for(trained.recipe, trained.task)
    blocks = tuple(
        block
        for block in recipe.blocks
        if trained.task in block.get("task", _TASKS) and any(_fits(trained.label, of) for of in block.get("of", ("*",)))
    )
    return replace(recipe, sections=_joined(recipe.sections, blocks), chosen=Chosen(recipe, blocks, trained.own))


def _fits(label: str, pattern: str) -> bool:
    words = pattern.split()
    patterns = [*words, *("*" for _ in range(_WORDS - len(words)))]
    return all(fnmatchcase(word, one) for word, one in zip(label.split(), patterns, strict=True))


def sections_of(recipe: Recipe, args: ResolvedCmdArgs, core: str | None, lacking: Collection[str]) -> Sections:
    """Return a point's sections: its preset's sections without blocks that an argument or the machine rules out.

    core: the release of Megatron-Core; None: a new release. lacking: capabilities that the machine certainly lacks.
    Unsupported settings fall back if a recipe chose them, and are rejected if a user names them.
    """
    if (chosen := recipe.chosen) is None:
        return {name: dict(values) for name, values in recipe.sections.items()}
    changed = {name for block in chosen.blocks for name in block.get("with", ()) if _is_changed(name, args, recipe)}
    blocks = [block for block in chosen.blocks if changed.isdisjoint(block.get("with", ()))]
    able = [block for block in blocks if core is None or all(_is_field(path, core) for path, _ in _fields(block))]
    return _joined(chosen.recipe.sections, [block for block in able if not _needs(block, lacking)])


@cache
def _is_field(path: str, core: str) -> bool:
    section, _, name = path.partition(".")
    classes = load_schema(core)["classes"]
    form = parse(classes[CONTAINER]["fields"][section]["type"])
    return any(name in classes[one.args[0]]["fields"] for one in options_of(form, "config") if one.args[0] in classes)


def _is_changed(name: str, args: ResolvedCmdArgs, recipe: Recipe) -> bool:
    """Return whether a point's value of an argument differs from its preset's, or from the recipe's with it."""
    section, _, field_name = (ARGUMENTS[name].config or "").partition(".")
    own = recipe.chosen.own if recipe.chosen else {}
    return bool(_plain(getattr(args, name)) != _plain(own.get(name, recipe.default(section, field_name))))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(names_in(value)) or None
    return None if not value or value in _OFF else value


def _needs(block: Block, lacking: Collection[str]) -> bool:
    """Return whether a block needs a missing capability."""
    return any(
        _NEEDS[path][0] in lacking and value not in _NEEDS[path][1] for path, value in _fields(block) if path in _NEEDS
    )


def _fields(block: Block) -> Iterator[tuple[str, Any]]:
    for section, values in block.items():
        if section not in _HEAD:
            yield from ((f"{section}.{name}", value) for name, value in values.items())


def _joined(sections: Mapping[str, Mapping[str, Any]], blocks: Collection[Block]) -> Sections:
    joined = {name: dict(values) for name, values in sections.items()}
    for block in blocks:
        for path, value in (*_fields(block), *((path, None) for path in block.get("unset", ()))):
            section, _, name = path.partition(".")
            is_name = name == "tp_comm_overlap_cfg" and isinstance(value, str)
            joined.setdefault(section, {})[name] = user_buffers(value) if is_name else value
    return joined
