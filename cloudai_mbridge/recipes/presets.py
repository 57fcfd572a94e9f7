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
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from cloudai_mbridge.megatron_bridge.presets import Preset
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs, names_in
from cloudai_mbridge.recipes.load import Block, Recipe, Sections, one_name, recipe_for
from cloudai_mbridge.training.compat.versions import GPU
from cloudai_mbridge.training.schema.forms import load_schema, options_of, parse, releases_of
from cloudai_mbridge.training.schema.known_names import CONTAINER
from cloudai_mbridge.training.schema.not_done import NEEDS

_HEAD = ("of", "with", "unset", "task")
_TASKS = ("pretrain",)
_WORDS = 4  # GPU, number format, variant, GPUs of the job
_OFF: tuple[Any, ...] = ("", "none", "None", [])
_CONFIG = "cloudai_mbridge.training.comm_overlap.user_buffers"
# Precision, GPU, hidden size and sizes of the layout -> SMs of qkv_dgrad, qkv_wgrad, fc1_dgrad and fc1_wgrad, and of
# proj_fprop and fc2_fprop in chunks; without the last two these pass a ring, as the all-gathers do
_TUNED: dict[str, tuple[int, ...]] = {
    "bf16_h100_h8192_tp4_mbs1_seqlen8192": (4, 24, 2, 4, 24, 16),
    "fp8_h100_h8192_tp4_mbs1_seqlen8192": (4, 24, 2, 4),
    "bf16_b200_h8192_tp2_mbs1_seqlen8192": (16, 24, 2, 4, 32, 16),
    "fp8_b200_h8192_tp2_mbs1_seqlen8192": (4, 24, 2, 4),
    "bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192": (2, 24, 2, 2, 24, 8),
    "fp8_h100_h16384_tp8_cp2_mbs1_seqlen8192": (2, 24, 2, 2),
    "bf16_b200_h16384_tp4_cp2_mbs1_seqlen8192": (8, 24, 2, 2, 32, 8),
    "fp8_b200_h16384_tp4_cp2_mbs1_seqlen8192": (8, 32, 2, 8),
}
TUNED = tuple(_TUNED)
_NEEDS = {**NEEDS, "model.moe_flex_dispatcher_backend": (GPU, (None,))}


_made: dict[tuple[str, str, str], Recipe] = {}


def with_preset_of(recipe: Recipe, preset: Preset | None) -> Recipe:
    """Return the recipe with its blocks for a preset of the embedded loop: the same object for the same preset."""
    if preset is None or not recipe.blocks:
        return recipe
    row = preset.row
    task, label = one_name(row.task), f"{row.gpu} {row.compute_dtype} {row.variant or '-'} {row.num_gpus}"
    key = (recipe.name, task, label)
    if key not in _made:
        base = recipe_for(recipe.name, task)
        blocks = tuple(
            block
            for block in base.blocks
            if task in block.get("task", _TASKS) and any(_fits(label, of) for of in block.get("of", ("*",)))
        )
        sections = _joined(base.sections, blocks)
        _made[key] = replace(base, sections=sections, base=base, chosen=blocks, own=preset.values)
    return _made[key]


def _fits(label: str, pattern: str) -> bool:
    words = pattern.split()
    patterns = [*words, *("*" for _ in range(_WORDS - len(words)))]
    return all(fnmatchcase(word, one) for word, one in zip(label.split(), patterns, strict=True))


def sections_of(recipe: Recipe, args: ResolvedCmdArgs, core: str | None, lacking: Collection[str]) -> Sections:
    """Return a point's sections: its preset's sections without blocks that an argument or the machine rules out.

    core: the release of Megatron-Core; None: a new release. lacking: capabilities that the machine certainly lacks.
    Unsupported settings fall back if a recipe chose them, and are rejected if a user names them.
    """
    changed = {name for block in recipe.chosen for name in block.get("with", ()) if _is_changed(name, args, recipe)}
    blocks = [block for block in recipe.chosen if changed.isdisjoint(block.get("with", ()))]
    able = [block for block in blocks if core is None or all(_is_field(path, core) for path, _ in _fields(block))]
    return _joined((recipe.base or recipe).sections, [block for block in able if not _needs(block, lacking)])


@cache
def _is_field(path: str, core: str) -> bool:
    section, _, name = path.partition(".")
    classes = load_schema(core)["classes"]
    form = parse(classes[CONTAINER]["fields"][section]["type"])
    return any(name in classes[one.args[0]]["fields"] for one in options_of(form, "config") if one.args[0] in classes)


def _is_changed(name: str, args: ResolvedCmdArgs, recipe: Recipe) -> bool:
    """Return whether a point's value of an argument differs from its preset's, or from the recipe's with it."""
    section, _, field_name = (ARGUMENTS[name].config or "").partition(".")
    return bool(_plain(getattr(args, name)) != _plain(recipe.own.get(name, recipe.default(section, field_name))))


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


def user_buffers(name: str) -> dict[str, Any]:
    """Return tuned user buffers of tensor parallelism, by a name of `TUNED`, in the form of a training config.

    `training.comm_overlap` has them as classes.
    """
    bulk, chunks = _TUNED[name][:4], _TUNED[name][4:]
    ring = {"_target_": f"{_CONFIG}.RingExchangeOverlapCfg"}
    slots: dict[str, Any] = {slot: {**ring} for slot in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")}
    for slot, num_sm in zip(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), bulk, strict=True):
        slots[slot] = {"_target_": f"{_CONFIG}.BulkOverlapCfg", "num_sm": num_sm, "cga_size": 2, "set_sm_margin": False}
    for i, slot in enumerate(("proj_fprop", "fc2_fprop")):
        slots[slot] = {**ring, "set_sm_margin": True}
        if chunks:
            slots[slot] = {"_target_": f"{_CONFIG}.PipelineOverlapCfg", "num_sm": chunks[i], "cga_size": 2}
            slots[slot] |= {"num_splits": 4, "set_sm_margin": True}
    return {"_target_": f"{_CONFIG}.TransformerLayerTPOverlapCfg", **slots}


def fields_since(sections: Sections, release: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that a release of Megatron-Core lacks and others have, with those releases.

    release: such as "0.16".
    """
    for section, values in sections.items():
        for name in values:
            if (since := _releases_with(f"{section}.{name}", release)) is not None:
                yield f"{section}.{name}", since


@cache
def _releases_with(path: str, release: str) -> str | None:
    """Return the releases that have a field, such as "0.18 or newer"; None if `release` does, or none."""
    section, _, name = path.partition(".")
    fields = load_schema(None)["classes"][CONTAINER]["fields"]
    if section not in fields or _is_field(path, release):
        return None
    classes = (one.args[0] for one in options_of(parse(fields[section]["type"]), "config"))
    return next((found for each in classes if (found := releases_of(each, name))), None)
