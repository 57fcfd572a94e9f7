"""Models, their tokenizers and the losses of their routers.

Megatron-Core has renamed and moved the models of Mamba, attention and MLP layers. 0.17 renamed the library of its null
tokenizer, 0.18 includes the end of a document in its size. Losses of routers are a dictionary with functions around it
up to 0.17, an object from 0.18 on.
"""

import inspect
from importlib import import_module
from typing import Any

import torch
from megatron.core.tokenizers import MegatronTokenizer, megatron_tokenizer
from megatron.core.tokenizers.text.libraries import NullTokenizer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import current_device

try:  # since 0.18
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    _SPECS, _SPEC = "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"
except ImportError:
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

    _SPECS, _SPEC = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"

__all__ = ["HybridModel", "HybridStack", "HybridStackSubmodules"]

_TAKES = inspect.signature(HybridModel).parameters
NULL = "null-text" if "null-text" in getattr(megatron_tokenizer, "TEXT_LIBRARIES", ()) else "null"
_COUNTS_ITS_END = "eod_id" in inspect.signature(NullTokenizer).parameters
_HAS_TRACKER = hasattr(moe_utils, "get_moe_metrics_tracker")


def has_unified_patterns() -> bool:
    """Return whether a pattern may hold stages and multi-token prediction: since 0.17."""
    return "hybrid_layer_pattern" in _TAKES


def te_stack_spec(*, for_modelopt: bool = False) -> ModuleSpec:
    """Return Megatron-Core's own layers, from Transformer Engine; or the layers that NVIDIA's ModelOpt converts."""
    if for_modelopt:
        kind = _SPEC.removesuffix("_stack_spec")
        module = import_module(f"megatron.core.post_training.modelopt.{kind}.model_specs")
        converted: ModuleSpec = getattr(module, f"get_{kind}_stack_modelopt_spec")(remap_te_layernorm=True)
        return converted
    spec: ModuleSpec = getattr(import_module(_SPECS), _SPEC)
    return spec


def build_hybrid(spec: ModuleSpec, pattern: str | None, vp_stage: int | None, **arguments: Any) -> Any:
    """Build a stage of the model. arguments: common to every release."""
    arguments[_SPEC] = spec
    if has_unified_patterns():
        return HybridModel(hybrid_layer_pattern=pattern, vp_stage=vp_stage, **arguments)
    return HybridModel(hybrid_override_pattern=pattern, **arguments)


def build_null_tokenizer(num_ids: int, metadata: dict[str, Any], eod_id: int | None = None, pad_id: int = -1) -> Any:
    """Build a tokenizer of `num_ids` ids; the last is the end of a document, as in Megatron-Bridge 0.3 and 0.6.

    eod_id, pad_id: other ids than the last and none, from 0.18 on.

    ConfigError: an id out of range, or an older release.
    """
    given = {"null_tokenizer_eod_id": eod_id, "null_tokenizer_pad_id": None if pad_id == -1 else pad_id}
    for name, value in given.items():
        if value is not None and not 0 <= value < num_ids:
            raise ConfigError(f"tokenizer.{name} = {value} is not among the {num_ids} ids; use 0 to {num_ids - 1}")
        if value is not None and not _COUNTS_ITS_END:
            raise ConfigError(f"tokenizer.{name} = {value} needs Megatron-Core 0.18 or newer; remove it")
    options = {"eod_id": eod_id, "pad_id": pad_id} if _COUNTS_ITS_END else {}
    size = num_ids if _COUNTS_ITS_END else num_ids - 1
    return MegatronTokenizer.from_pretrained(None, {**metadata, "library": NULL}, vocab_size=size, **options)


def report_router_losses(names: list[str], length: int, **options: Any) -> None:
    """Reduce, log and clear these losses. A collective.

    length: of every loss, the layers that may have routers; a stage without any takes part with zeros.
    options: as `track_moe_metrics` of Megatron-Core 0.16 takes them.
    """
    # A stage without routers gets the empty entries that the sum over stages needs, as long as other stages'
    if _HAS_TRACKER:
        tracker = moe_utils.get_moe_metrics_tracker()
        for name in names:
            tracker.ensure_initialized(name, length, current_device())
        tracker.report(track_names=names, **options)
        return
    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in names:
        if name not in entries:
            values = torch.zeros(length, device=current_device())
            entries[name] = {"values": values, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
    moe_utils.track_moe_metrics(track_names=names, **options)
