"""Settings of Megatron-Bridge's performance recipes that affect memory and that a point's arguments leave open.

One table of facts: recipe, GPUs, number formats (empty: all), settings. Later rows win. Source: Megatron-Bridge,
`scripts/performance/configs/*/*_workload_base_configs.py` and `*_llm_pretrain.py` (2025 and 2026; if versions
differ, the newest that has the published layout). All of them reduce gradients in 16 bits, balance the routing by force
and let Transformer Engine write the loss's gradient over the 16-bit logits.
"""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.estimate.precision import Precision


@dataclass(frozen=True)
class RecipeSetting:
    """A row. is_fsdp: for points with Megatron-FSDP only; None: for all."""

    recipe: str
    gpus: tuple[str, ...]
    formats: tuple[Precision, ...]
    sets: dict[str, Any]
    is_fsdp: bool | None = None


_CS, _MX, _BF16, _NVFP4 = Precision.FP8_CS, Precision.FP8_MX, Precision.BF16, Precision.NVFP4


def _again(*modules: str) -> dict[str, Any]:
    return {"recompute_modules": frozenset(modules)}


def _offload(layers: int) -> dict[str, Any]:
    return {"activation_offload_layers": layers}


# its offloading of tensors above 500 MB is meant for, and affects, the inputs of the experts' activation functions
_ULTRA = {"use_megatron_fsdp": True, "offload_modules": frozenset({"moe_act"})}

PRESETS = (
    RecipeSetting("deepseek_v3", (), (), _again("mla_up_proj")),
    RecipeSetting("deepseek_v3", ("h100", "b200"), (), _again("mla_up_proj", "mlp")),
    RecipeSetting("deepseek_v3", ("gb300",), (_BF16,), _again("moe_act")),
    RecipeSetting("deepseek_v4_flash", (), (), _again("moe_act")),
    RecipeSetting("kimi_k2", (), (), _again("mla_up_proj")),
    RecipeSetting("kimi_k2", ("h100",), (), _again("mla_up_proj", "mlp")),
    RecipeSetting("gpt_oss_120b", ("h100", "b200", "gb200"), (), _again("layernorm", "moe_act")),
    RecipeSetting("nemotron_3_nano", ("h100",), (_BF16,), _again("moe", "layernorm")),
    RecipeSetting("nemotron_3_nano", ("h100",), (_CS,), _again("moe", "layernorm", "core_attn", "moe_act")),
    RecipeSetting("nemotron_3_super", ("gb200",), (_BF16, _MX), _again("moe_act", "layernorm", "core_attn", "moe")),
    RecipeSetting("nemotron_3_super", ("b200",), (_BF16, _MX), _again("moe_act", "layernorm", "core_attn")),
    RecipeSetting("nemotron_3_ultra", (), (), {**_again("moe_act"), **_ULTRA}),
    RecipeSetting("llama3_8b", ("h100",), (_CS,), {"recompute_num_layers": 5}),
    RecipeSetting("llama3_70b", ("gb300",), (_BF16,), _offload(30), is_fsdp=True),
    RecipeSetting("llama3_70b", ("gb300",), (_CS,), _offload(20), is_fsdp=True),
    RecipeSetting("llama3_70b", ("gb200",), (_BF16,), _offload(20), is_fsdp=True),
    RecipeSetting("llama3_70b", ("gb200",), (_CS,), _offload(40), is_fsdp=True),
    RecipeSetting("llama3_70b", ("b200",), (_CS,), _offload(5), is_fsdp=True),
    RecipeSetting("llama31_405b", ("gb300",), (_BF16,), _offload(40), is_fsdp=True),
    RecipeSetting("llama31_405b", ("gb300",), (_CS,), _offload(10), is_fsdp=True),
    RecipeSetting("llama31_405b", ("gb200",), (_CS,), _offload(92), is_fsdp=True),
)


def preset(recipe: str, gpu: str, precision: Precision, *, is_fsdp: bool) -> dict[str, Any]:
    """Return the upstream recipe's settings for a GPU and format: names as in `ParallelLayout`, and recompute_*."""
    found: dict[str, Any] = {}
    for row in PRESETS:
        is_meant = row.recipe == recipe and gpu in (row.gpus or [gpu]) and precision in (row.formats or [precision])
        if is_meant and row.is_fsdp in (None, is_fsdp):
            found |= row.sets
    return found
