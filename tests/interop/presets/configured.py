"""What a configuration of Megatron-Bridge sets, by our argument names."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.preset_rows import FIELDS
from tests.interop.presets.static import UNKNOWN, Evaluator, Instance
from tests.interop.presets.static.values import External, Intrinsic, Raised

# Defaults of Megatron-Core's TransformerConfig and DistributedDataParallelConfig (transformer_config.py,
# model_parallel_config.py, distributed_data_parallel_config.py), the same in 0.15 to 0.19.
_MODEL_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "cuda_graph_impl": "none",
    "cuda_graph_scope": "full",
    "cuda_graph_modules": "full",
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "cpu_offloading": False,
    "cpu_offloading_num_layers": 0,
    "pipeline_model_parallel_layout": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("TransformerConfig", "ModelParallelConfig", "ModelProvider"), _MODEL_DEFAULTS),
    "DistributedDataParallelConfig": {"use_megatron_fsdp": False, "nccl_ub": False},
}
_SWITCHES = ("use_megatron_fsdp", "nccl_ub", "moe_a2a_overlap", "sequence_parallel")
_STAGE_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def evaluator(clone: Path) -> Evaluator:
    """Return an evaluator of a clone's code, which takes a model from Hugging Face as one of unknown architecture."""
    provider = Intrinsic(lambda ev, *args, **keywords: Instance(External("ModelProvider")))
    bridge = Instance(None, {"to_megatron_provider": provider, "get_model_config": provider})
    auto_bridge = Instance(None, {"from_hf_pretrained": Intrinsic(lambda ev, *args, **keywords: bridge)})
    scripts = clone / "scripts"
    return Evaluator(
        (clone / "src", scripts / "performance", scripts / "common"),
        {"AutoBridge": auto_bridge, **_GRAPH_HELPERS},
        _DEFAULTS,
    )


def _set_graph_modules(ev: Evaluator, model: Any, modules: Any) -> None:
    ev.set_attribute(model, "cuda_graph_modules", modules)
    ev.set_attribute(model, "cuda_graph_scope", None)


def _set_full_iteration(ev: Evaluator, model: Any) -> None:
    ev.set_attribute(model, "cuda_graph_impl", "full_iteration")
    _set_graph_modules(ev, model, [])


# megatron/bridge/utils/cuda_graph.py, with Megatron-Core 0.18 or later.
_GRAPH_HELPERS = {
    "set_cuda_graph_modules": Intrinsic(_set_graph_modules),
    "clear_cuda_graph_modules": Intrinsic(lambda ev, model: _set_graph_modules(ev, model, [])),
    "set_full_iteration_cuda_graph": Intrinsic(_set_full_iteration),
}


def configured(ev: Evaluator, config: Any) -> dict[str, Any]:
    """Return what a configuration sets, without what is not known."""
    values = {name: _field(ev, config, path) for name, path in FIELDS.items()}
    if _field(ev, config, "model.cpu_offloading") is False:
        values["activation_offload_layers"] = 0
    modules = _field(ev, config, "model.cuda_graph_modules")
    values["cuda_graph_scope"] = _graph_scope(values["cuda_graph_scope"], modules)
    if not isinstance(values["env_vars"], dict):  # before 0.6, the launcher's plugins set variables
        del values["env_vars"]
    return {name: _plain(name, value) for name, value in values.items() if _is_plain(value)}


def _field(ev: Evaluator, value: Any, path: str) -> Any:
    for name in path.split("."):
        if value is None:  # such as comm_overlap: nothing overlaps
            return False
        if not isinstance(value, Instance):
            return UNKNOWN
        try:
            value = ev.attribute(value, name)
        except Raised:
            return None
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, bool | int | str)


def _plain(name: str, value: Any) -> Any:
    if name == "pipeline_model_parallel_layout" and isinstance(value, list | tuple):
        return layout_text(value)
    if name in _SWITCHES:
        return bool(value)
    if isinstance(value, dict):  # NAME=VALUE, which no value has a space in
        return [f"{key}={item}" for key, item in sorted(value.items())]
    return list(value) if isinstance(value, tuple) else value


def _graph_scope(scope: Any, modules: Any) -> Any:
    """Join what Megatron-Core 0.18 and later call modules and what all call scope; "full" means none."""
    if not _is_plain(scope) or not _is_plain(modules):
        return UNKNOWN
    names = [name for value in (modules, scope) for name in ([value] if isinstance(value, str) else value or ())]
    return [name for name in dict.fromkeys(names) if name != "full"]


def layout_text(stages: Iterable[Iterable[str]]) -> str:
    """Write a pipeline layout in Megatron's short form, such as Et*4|(t*4|)*14tmL, a stage of four layers 14 times."""
    runs = [(stage, len(list(run))) for stage, run in groupby(_stage_text(stage) for stage in stages)]
    *front, (last, count) = runs
    front += [(last, count - 1)] if count > 1 else []
    return "".join(f"({stage}|)*{count}" if count > 1 else f"{stage}|" for stage, count in front) + last


def _stage_text(stage: Iterable[str]) -> str:
    runs = ((_STAGE_LETTERS[kind], len(list(run))) for kind, run in groupby(stage))
    return "".join(letter + (f"*{count}" if count > 1 else "") for letter, count in runs)
