"""Join a preset with the user's arguments as the launcher's `set_user_overrides`, `set_post_overrides`, by release."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from cloudai_mbridge.megatron_bridge.presets.rows import PresetRow
from cloudai_mbridge.megatron_bridge.release import Release

# Options that switch these on take effect; options that switch them off do nothing.
_SWITCHES = ("use_megatron_fsdp", "nccl_ub", "moe_a2a_overlap")
_RECOMPUTE = ("recompute_num_layers", "recompute_modules")
_GRAPH = ("cuda_graph_impl", "cuda_graph_scope")
# Default modules of Megatron-Core's selective recomputation (transformer_config.py).
_SELECTIVE = ["core_attn"]
# If the user sets any of these, the result does not follow from the preset alone.
_INVOLVED = frozenset((*_SWITCHES, *_RECOMPUTE, *_GRAPH, "activation_offload_layers"))


@dataclass(frozen=True)
class Preset:
    """The launcher's defaults for one recipe, GPU, number format, task and variant.

    name: recipe, task, GPU, number format and variant, as upstream writes them.
    num_gpus: the job's size that it was made for.
    values: by our argument names (`UPSTREAM_DECIDES`, and recompute_granularity, recompute_method,
        moe_flex_dispatcher_backend and sequence_parallel); what is absent here is not known. None means that upstream
        leaves it unset.
    before_0_5, as_in_0_6: whose rules its release has: 0.5 has neither's.
    """

    release: Release
    name: str
    num_gpus: int
    values: Mapping[str, Any]
    row: PresetRow = field(repr=False)
    before_0_5: bool = field(repr=False)
    as_in_0_6: bool = field(repr=False)
    layouts: Mapping[tuple[int, int], str | None] = field(repr=False, default_factory=dict)


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without settings that have no effect: of recomputation, and the scope of disabled CUDA graphs."""
    result = dict(values)
    if {"recompute_granularity", *_RECOMPUTE} <= values.keys():
        _recompute(result, values["recompute_granularity"])
    else:
        result = {name: value for name, value in values.items() if name not in _RECOMPUTE}
    if result.get("cuda_graph_impl") == "none":
        result["cuda_graph_scope"] = []
    return result


def _recompute(result: dict[str, Any], granularity: str | None) -> None:
    modules = result["recompute_modules"]
    result["recompute_modules"] = []
    if granularity == "selective":
        result["recompute_modules"] = _SELECTIVE if modules is None else modules
    if granularity != "full":
        result["recompute_num_layers"] = None
    elif result.get("recompute_method") != "block":  # uniform: every layer, in groups of that many
        del result["recompute_num_layers"]


def resolve_sizes(given: Mapping[str, Any], num_gpus: int, preset: Preset) -> dict[str, Any]:
    """Return the sizes as the launcher resolves them; missing sizes are unknown.

    given: the point's values of `UPSTREAM_DECIDES`, as `given_by` returns them.
    """
    result = _joined(given, preset)
    if preset.layouts:
        _rederive_layout(result, given, preset)
    if "gb" not in given:
        batch = _scaled_batch(result, num_gpus, preset)
        if batch is None:
            result.pop("gb", None)
        else:
            result["gb"] = batch
    return result


def _joined(given: Mapping[str, Any], preset: Preset) -> dict[str, Any]:
    """Return a preset joined with the given values, with the batch unscaled."""
    result = {**preset.values, **given}
    if "tp" in given:
        result["sequence_parallel"] = given["tp"] > 1
    if _INVOLVED.isdisjoint(given):
        return result
    # until 0.4, 0 layers to offload override the preset
    for name in _SWITCHES if preset.before_0_5 else (*_SWITCHES, "activation_offload_layers"):
        if name in given and not given[name]:
            _keep(result, preset.values, name)
    if not given.keys().isdisjoint(_RECOMPUTE):
        _given_recompute(result, given)
    if not given.keys().isdisjoint(_GRAPH):
        _given_graph(result, given, preset)
    return result


def _keep(result: dict[str, Any], known: Mapping[str, Any], name: str) -> None:
    """Keep the preset's value, or drop the name if that is unknown."""
    result.pop(name, None)
    if name in known:
        result[name] = known[name]


def _given_recompute(result: dict[str, Any], given: Mapping[str, Any]) -> None:
    selective = "recompute_modules" in given
    result["recompute_granularity"] = "selective" if selective else "full"
    if selective:
        result["recompute_num_layers"] = None
    else:
        result["recompute_method"] = "block"
        result["recompute_modules"] = []


def _given_graph(result: dict[str, Any], given: Mapping[str, Any], preset: Preset) -> None:
    if "cuda_graph_scope" not in given:
        _keep(result, preset.row.values, "cuda_graph_scope")
    refused = "transformer_engine"  # the launcher stops: with it, the scope full_iteration is an error
    if preset.as_in_0_6 and given.get("cuda_graph_scope") == ["full_iteration"]:
        if result.get("cuda_graph_impl") not in ("none", refused):
            result["cuda_graph_impl"] = "full_iteration"
        result["cuda_graph_scope"] = ["full_iteration"] if result.get("cuda_graph_impl") == refused else []
    if result.get("cuda_graph_impl") == "none":
        result["cuda_graph_scope"] = []


def _rederive_layout(result: dict[str, Any], given: Mapping[str, Any], preset: Preset) -> None:
    """Set the pipeline layout that the launcher derives from a given pp or vp, for recipes with such layouts."""
    name = "pipeline_model_parallel_layout"
    if name in given or not ("pp" in given or "vp" in given):
        return
    if "pp" not in result or "vp" not in result:
        result.pop(name, None)
        return
    sizes = (result["pp"] or 1, result["vp"] or 1)
    if preset.row.recipe == "deepseek_v3":
        if sizes in preset.layouts:
            result[name] = preset.layouts[sizes]
    elif result.get(name) is None or result[name] in preset.layouts.values():  # a layout of its own stands
        result[name] = preset.layouts.get(sizes)


def _scaled_batch(result: Mapping[str, Any], num_gpus: int, preset: Preset) -> int | None:
    """Return the global batch, scaled to the job's size; None if the launcher rejects scaling it.

    It follows the data-parallel size from 0.6 on, else the number of GPUs; a batch that the preset's builder has
    changed does so only until 0.4.
    """
    row, own = preset.row, preset.row.values.get("gb")
    if num_gpus == row.num_gpus or not isinstance(own, int):
        return own
    base = own if row.base_gb is None else row.base_gb
    if preset.as_in_0_6:
        before, after = _data_parallel(row.values, row.num_gpus), _data_parallel(result, num_gpus)
        if not before or not after or base * after % before:
            return None
        return base * after // before
    if base != own and not preset.before_0_5:
        return own
    return int(base / row.num_gpus * num_gpus)


def _data_parallel(values: Mapping[str, Any], num_gpus: int) -> int | None:
    """Return the data-parallel size, None if the sizes are unknown or do not divide the job."""
    sizes = [values.get(name) for name in ("tp", "pp", "cp")]
    size = prod(size if isinstance(size, int) else 0 for size in sizes)
    return None if size < 1 or num_gpus % size else num_gpus // size
