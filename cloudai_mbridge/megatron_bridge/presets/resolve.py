"""How the launcher joins a preset and what the user says: `set_user_overrides` and `set_post_overrides`, by release."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.megatron_bridge.presets.rows import PresetRow

# An option that switches one of these on does; one that switches it off does nothing.
_SWITCHES = ("use_megatron_fsdp", "nccl_ub", "moe_a2a_overlap")
_RECOMPUTE = ("recompute_num_layers", "recompute_modules")
_GRAPH = ("cuda_graph_impl", "cuda_graph_scope")
# What Megatron-Core recomputes selectively when no modules are named (transformer_config.py).
_SELECTIVE = ["core_attn"]
# Said of these, the preset alone does not tell what comes out.
_INVOLVED = frozenset((*_SWITCHES, *_RECOMPUTE, *_GRAPH, "activation_offload_layers"))


@dataclass(frozen=True)
class Rules:
    """What differs between releases.

    scales_by_dp: the batch follows the data-parallel size (0.6), else the number of GPUs.
    scales_changed_batch: also a batch that the preset's builder has changed (until 0.4).
    takes_no_offload: 0 layers to offload overrides the preset (until 0.4).
    joins_full_iteration: the scope full_iteration is an implementation (0.6).
    """

    scales_by_dp: bool
    scales_changed_batch: bool
    takes_no_offload: bool
    joins_full_iteration: bool


def rules_for(version: tuple[int, ...], as_in_0_6: bool) -> Rules:
    """Return the rules of a release."""
    before_0_5 = version < (0, 5)
    return Rules(as_in_0_6, before_0_5, before_0_5, as_in_0_6)


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with what has no effect left out: of recomputation, and the scope of CUDA graphs that are off."""
    result = dict(values)
    if "recompute_granularity" in values and all(name in values for name in _RECOMPUTE):
        _recompute(result, values["recompute_granularity"])
    else:
        _drop(result, _RECOMPUTE)
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
        _drop(result, ("recompute_num_layers",))


def _drop(result: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        result.pop(name, None)


def join(row: PresetRow, known: Mapping[str, Any], given: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Return what comes out for a preset (`known`: its effective values) and what is given, but for the batch."""
    result = {**known, **given}
    if "tp" in given:
        result["sequence_parallel"] = given["tp"] > 1
    if _INVOLVED.isdisjoint(given):
        return result
    _switches(result, known, given)
    if "activation_offload_layers" in given and not given["activation_offload_layers"] and not rules.takes_no_offload:
        _keep(result, known, "activation_offload_layers")
    if not given.keys().isdisjoint(_RECOMPUTE):
        _given_recompute(result, given)
    if not given.keys().isdisjoint(_GRAPH):
        _given_graph(result, row.values, given, rules)
    return result


def _switches(result: dict[str, Any], known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in _SWITCHES:
        if name in given and not given[name]:
            _keep(result, known, name)


def _keep(result: dict[str, Any], known: Mapping[str, Any], name: str) -> None:
    """Let the preset's value stand, unknown if it is."""
    if name in known:
        result[name] = known[name]
    else:
        del result[name]


def _given_recompute(result: dict[str, Any], given: Mapping[str, Any]) -> None:
    selective = "recompute_modules" in given
    result["recompute_granularity"] = "selective" if selective else "full"
    if selective:
        result["recompute_num_layers"] = None
    else:
        result["recompute_method"] = "block"
        result["recompute_modules"] = []


def _given_graph(result: dict[str, Any], raw: Mapping[str, Any], given: Mapping[str, Any], rules: Rules) -> None:
    if "cuda_graph_scope" not in given:
        if "cuda_graph_scope" in raw:
            result["cuda_graph_scope"] = raw["cuda_graph_scope"]
        else:
            result.pop("cuda_graph_scope", None)
    refused = "transformer_engine"  # the launcher stops: with it, the scope full_iteration is an error
    if rules.joins_full_iteration and given.get("cuda_graph_scope") == ["full_iteration"]:
        if result.get("cuda_graph_impl") not in ("none", refused):
            result["cuda_graph_impl"] = "full_iteration"
        result["cuda_graph_scope"] = ["full_iteration"] if result.get("cuda_graph_impl") == refused else []
    if result.get("cuda_graph_impl") == "none":
        result["cuda_graph_scope"] = []


def rederive_layout(
    result: dict[str, Any], given: Mapping[str, Any], layouts: Mapping[tuple[int, int], str | None], recipe: str
) -> None:
    """Set the pipeline layout that the launcher derives from a given pp or vp, for recipes with such layouts."""
    name = "pipeline_model_parallel_layout"
    if name in given or not ("pp" in given or "vp" in given):
        return
    if "pp" not in result or "vp" not in result:
        result.pop(name, None)
        return
    sizes = (result["pp"] or 1, result["vp"] or 1)
    if recipe == "deepseek_v3":
        if sizes in layouts:
            result[name] = layouts[sizes]
    elif result.get(name) is None or result[name] in layouts.values():  # a layout of its own stands
        result[name] = layouts.get(sizes)


def scaled_batch(row: PresetRow, result: Mapping[str, Any], num_gpus: int, rules: Rules) -> int | None:
    """Return the global batch, scaled to the job's size; None where the launcher refuses to scale it."""
    own = row.values.get("gb")
    if num_gpus == row.num_gpus or not isinstance(own, int):
        return own
    base = own if row.base_gb is None else row.base_gb
    if rules.scales_by_dp:
        before, after = data_parallel(row.values, row.num_gpus), data_parallel(result, num_gpus)
        if not before or not after or base * after % before:
            return None
        return base * after // before
    if base != own and not rules.scales_changed_batch:
        return own
    return int(base / row.num_gpus * num_gpus)


def data_parallel(values: Mapping[str, Any], num_gpus: int) -> int | None:
    """Return the data-parallel size, None where the sizes are not known or do not divide the job."""
    size = 1
    for name in ("tp", "pp", "cp"):
        if not isinstance(values.get(name), int):
            return None
        size *= values[name]
    return None if size < 1 or num_gpus % size else num_gpus // size
