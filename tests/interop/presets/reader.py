"""Read the presets of a clone of Megatron-Bridge from its source, without running it.

Two layouts are known. Up to 0.5, `scripts/performance/configs/<family>` holds sizes (`WorkloadBaseConfig`) and builders
that apply them, and a preset is found by family, recipe, task, GPU, number format and variant. From 0.6 on, each preset
is a function of `megatron.bridge.perf_recipes` whose name says recipe, task, job size, GPU, number format and variant.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.launcher_options import read_options
from cloudai_mbridge.megatron_bridge.preset_rows import PresetCatalog, PresetRow, chosen_variant
from tests.interop.presets.configured import configured, evaluator, layout_text
from tests.interop.presets.static import UNKNOWN, Evaluator, Instance, Unsupported
from tests.interop.presets.static.values import Function, Module, Raised

_SCRIPTS = Path("scripts/performance")
_FLAT_ROOT = Path("src/megatron/bridge/perf_recipes")
_FLAT_PACKAGE = "megatron.bridge.perf_recipes"


def read_source(clone: Path) -> PresetCatalog | None:
    """Return the presets of a clone, or None where it has neither layout."""
    ev = evaluator(clone)
    options = read_options(clone / _SCRIPTS / "argument_parser.py")
    dtypes = options["compute_dtype"].choices if "compute_dtype" in options else ()
    variant = (options["config_variant"].default if "config_variant" in options else None) or ""
    if is_flat := (clone / _FLAT_ROOT).is_dir():
        rows = _flat_rows(ev, clone, dtypes)
    elif (clone / _SCRIPTS / "configs").is_dir():
        rows = _workload_rows(ev, clone, dtypes, variant)
    else:
        return None
    return PresetCatalog(is_flat, variant, tuple(rows), _layouts(ev))


# up to 0.5


def _workload_rows(ev: Evaluator, clone: Path, dtypes: Iterable[str], default: str) -> Iterator[PresetRow]:
    for directory in sorted((clone / _SCRIPTS / "configs").iterdir()):
        module = ev.module(f"configs.{directory.name}") if directory.is_dir() else None
        if not isinstance(module, Module):
            continue
        for name in sorted(module.scope.names):
            if match := re.fullmatch(r"(\w+)_(pretrain|sft|lora|peft)_config_([a-z0-9]+)", name):
                for dtype in dtypes:
                    yield from _of_builder(ev, module, match, dtype, default)


def _of_builder(ev: Evaluator, module: Module, match: re.Match[str], dtype: str, default: str) -> Iterator[PresetRow]:
    """Yield a builder's presets of one number format: each variant, and the default one if it builds another."""
    family = module.dotted.rpartition(".")[2]
    prefix = f"{match[1]}_{match[2]}_config_{match[3]}_{dtype}".upper()
    sizes = {
        name[len(prefix) :].removeprefix("_").lower(): base
        for name in sorted(module.scope.names)
        if (name == prefix or name.startswith(f"{prefix}_"))
        and isinstance(base := _attribute(ev, module, name), Instance)
    }
    rows: dict[str, PresetRow] = {}
    for variant in [*sizes, *({default} - set(sizes))]:
        found = chosen_variant(sizes, variant)
        row = None if found is None else _workload_row(ev, module, match, dtype, variant or default, sizes[found])
        if row is not None and (found == variant or row != rows.get(str(found))):
            rows[variant] = row
    for variant, row in rows.items():
        yield replace(row, family=family, variant=variant)


def _workload_row(
    ev: Evaluator, module: Module, match: re.Match[str], dtype: str, variant: str, base: Instance
) -> PresetRow | None:
    config = _called(ev, module, match[0], precision=dtype, config_variant=variant)
    num_gpus, base_gb = (_attribute(ev, base, name) for name in ("num_gpus", "global_batch_size"))
    if config is None or not isinstance(num_gpus, int):
        return None
    values = configured(ev, config)
    scaled = base_gb if isinstance(base_gb, int) and base_gb != values.get("gb") else None
    return PresetRow("", match[1], match[2], match[3], dtype, "", num_gpus, True, values, scaled)


# from 0.6 on


def _flat_rows(ev: Evaluator, clone: Path, dtypes: Iterable[str]) -> Iterator[PresetRow]:
    packages = sorted(path.name for path in (clone / _FLAT_ROOT).iterdir() if (path / "__init__.py").is_file())
    modules = [ev.module(f"{_FLAT_PACKAGE}.{name}") for name in packages if not name.startswith("_")]
    names = {name: one for one in reversed(modules) if isinstance(one, Module) for name in one.scope.names}
    by_short = {dtype.replace("_", ""): dtype for dtype in dtypes}
    formats = "|".join(by_short)
    pattern = re.compile(rf"(\w+)_(pretrain|sft|peft|lora)_(\d+)gpu_([a-z0-9]+)_({formats})(?:_([a-z0-9_]+))?_config")
    rows = []
    for name, module in sorted(names.items()):
        match = pattern.fullmatch(name)
        config = _called(ev, module, name) if match else None
        if match and config is not None:
            name_of_recipe, task, num_gpus, gpu, dtype, variant = match.groups()
            key = (name_of_recipe, task, gpu, by_short[dtype], variant or "")
            rows.append(PresetRow("", *key, int(num_gpus), _is_defined(ev, module, name), configured(ev, config)))
    yield from _with_default(rows, _attribute(ev, ev.module("utils.utils"), "_DEFAULT_GPU_COUNT_OVERRIDES"))


def _is_defined(ev: Evaluator, module: Any, name: str) -> bool:
    """Whether a preset has a function of its own: those that are other names of one are taken for their size only."""
    function = _attribute(ev, module, name)
    return isinstance(function, Function) and getattr(function.node, "name", "") == name


def _with_default(rows: list[PresetRow], sizes: Any) -> Iterator[PresetRow]:
    """Mark the row of each preset that is taken for other job sizes: the largest, unless `sizes` lists another."""
    groups: dict[tuple[str, ...], list[PresetRow]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for (recipe, task, gpu, dtype, variant), group in groups.items():
        key = (recipe, task, gpu, dtype.replace("_", ""), variant or None)
        listed = sizes.get(key) if isinstance(sizes, dict) else None
        default = max((row.num_gpus for row in group if row.is_default), default=0) if listed is None else listed
        for row in sorted(group, key=lambda row: row.num_gpus):
            yield replace(row, is_default=row.is_default and row.num_gpus == default)


# both


def _layouts(ev: Evaluator) -> dict[str, dict[tuple[int, int], str | None]]:
    """Return the layouts that the launcher derives where the user says pp or vp: of two recipes."""
    found: dict[str, dict[tuple[int, int], str | None]] = {}
    for recipe, derive in (("deepseek_v3", _deepseek_layout), ("kimi_k2", _kimi_layout)):
        for pp, vp in product(_SIZES, _SIZES):
            if (layout := derive(ev, pp, vp)) is not UNKNOWN:
                text = layout_text(layout) if isinstance(layout, list) else layout
                found.setdefault(recipe, {})[pp, vp] = text
    return found


_SIZES = (*range(1, 17), 32, 64)


def _deepseek_layout(ev: Evaluator, pp: int, vp: int) -> Any:
    function = _attribute(
        ev, ev.module("megatron.bridge.recipes.deepseek.deepseek_v3"), "set_deepseek_v3_pipeline_model_parallel_layout"
    )
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vp, "mtp_num_layers": 1}
    model = Instance(None, {**sizes, "pipeline_model_parallel_layout": UNKNOWN}, is_open=False)
    _guarded(ev, function, [model], {})
    return model.attributes.get("pipeline_model_parallel_layout", UNKNOWN)


def _kimi_layout(ev: Evaluator, pp: int, vp: int) -> Any:
    function = _attribute(ev, ev.module("megatron.bridge.recipes.kimi.kimi_k2"), "_get_kimi_k2_pipeline_layout")
    return _guarded(ev, function, [pp, vp], {})


def _called(ev: Evaluator, module: Any, name: str, **keywords: Any) -> Instance | None:
    """Return the configuration that a builder returns, or None where it raises."""
    config = _guarded(ev, _attribute(ev, module, name), [], keywords)
    return config if isinstance(config, Instance) else None


def _guarded(ev: Evaluator, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    ev.start()
    try:
        return ev.call(function, arguments, keywords)
    except (Raised, Unsupported, RecursionError):
        return UNKNOWN


def _attribute(ev: Evaluator, value: Any, name: str) -> Any:
    try:
        return ev.attribute(value, name)
    except (Raised, Unsupported):
        return UNKNOWN
