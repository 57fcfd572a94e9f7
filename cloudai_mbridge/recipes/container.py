"""From the sections of a recipe to a `ConfigContainer` as plain data.

Recipes are short: shared and derived settings are added here. Field names are the names of
`cloudai_mbridge.training.config`; names are checked there, and by `training.schema` if torch is not installed.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.training.schema.known_names import ACTIVATIONS, OPTIMIZER_DTYPES

_MODELS = "cloudai_mbridge.training.models"
_DATASET = "cloudai_mbridge.training.config.dataset.MockGPTDatasetConfig"
_BUCKET_SIZE = 128 * 1024**2  # elements
RESOLVED_FILE = "resolved_config.yaml"

_BF16 = {"_target_": "torch.bfloat16"}
# Performance recipes reduce gradients in bf16
_MIXED: dict[str, Any] = {
    "_target_": "cloudai_mbridge.training.mixed_precision.MixedPrecisionConfig",
    "bf16": True,
    "params_dtype": _BF16,
    "pipeline_dtype": _BF16,
    "grad_reduce_in_fp32": False,
}
_FP8 = {**_MIXED, "fp8": "hybrid", "fp8_param_gather": True}
# Format -> its settings in upstream's launcher and performance recipes; these lack fp8_ds, their library has it.
# The layers in bf16 of fp8_cs are set, but not used
_PRECISIONS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "bf16": _MIXED,
    "fp8_cs": {**_FP8, "fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1},
    "fp8_ds": {**_FP8, "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "fp8_mx": {**_FP8, "fp8_recipe": "mxfp8", "fp8": "e4m3", "reuse_grad_buf_for_mxfp8_param_ag": True},
    "fp8_sc": {**_FP8, "fp8_recipe": "blockwise", "fp8_param_gather": False},
    "nvfp4": {**_MIXED, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True},
}
_GATHERS_FP4_SINCE = "0.17"

# Of a hybrid of Mamba: its class is always in bf16, and attention in it needs no positions
HYBRID = {"position_embedding_type": "none"}
_HYBRID_FP32 = {"bf16": False, "params_dtype": {"_target_": "torch.float32"}}

# Settings shared by all of our recipes that differ from Megatron's defaults. Fusions, precision, NaN checks and garbage
# collection as in Megatron-Bridge's performance recipes; `startup.prepare` reverts settings that a device lacks
MODEL_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "should_pad_vocab": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "deallocate_pipeline_outputs": True,
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "persist_layer_norm": True,
    "masked_softmax_fusion": True,
    "gradient_accumulation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te",
    "attention_softmax_in_fp32": False,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}
_FUSED_ACTIVATIONS = ("gelu", "quick_gelu", "silu")  # with their bias, in Megatron-Core
_SECTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"min_lr": 0.0, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
    "scheduler": {"lr_decay_style": "cosine"},
    "ddp": {"grad_reduce_in_fp32": False, "check_for_nan_in_grad": False, "average_in_collective": True},
    "rerun_state_machine": {"check_for_nan_in_loss": False},
    "train": {"manual_gc": True, "manual_gc_interval": 100},
    "dataset": {
        "_target_": _DATASET,
        "random_seed": 1234,
        "split": "99,1,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "num_workers": 0,
    },
    "logger": {"log_interval": 1, "logging_level": logging.WARNING, "save_config_filepath": RESOLVED_FILE},
    "tokenizer": {"tokenizer_type": "NullTokenizer"},
    "checkpoint": {},
    "validation": {"eval_iters": 0},
}


def container_data(sections: Mapping[str, Mapping[str, Any]], core: str | None = None) -> dict[str, Any]:
    """Return the container of a recipe's sections, which already contain the arguments of a point.

    core: the release of Megatron-Core; None: a new release.
    """
    given = {name: dict(values) for name, values in sections.items()}
    is_hybrid = "hybrid_layer_pattern" in given["model"]
    model = {**MODEL_DEFAULTS, **(HYBRID if is_hybrid else {}), **given.pop("model")}
    precision, format_of_recipe = model.pop("dtype", "bf16"), given.pop("mixed_precision", {})
    if is_hybrid and precision == "fp32":
        model.update(_HYBRID_FP32)
    activation = model.pop("activation", "silu")
    model["activation_func"] = {"_target_": ACTIVATIONS[activation]}
    if activation not in _FUSED_ACTIVATIONS and "bias_activation_fusion" not in sections["model"]:
        model["bias_activation_fusion"] = False
    is_latent = bool(model.get("multi_latent_attention"))
    if is_latent:
        model.setdefault("rope_type", "rope")
        model["apply_rope_fusion"] &= model["rope_type"] == "yarn"  # Megatron-Core has no other for such attention
    else:
        model = {name: value for name, value in model.items() if name not in _LATENT_ONLY}
    if model.get("num_moe_experts") is None:
        model = {name: value for name, value in model.items() if not name.startswith("moe_")}
    provider = "gpt_provider.MLAModelProvider" if is_latent else "gpt_provider.GPTModelProvider"
    if is_hybrid:
        provider = "hybrid_provider.HybridModelProvider"
    data: dict[str, Any] = {
        "model": {"_target_": f"{_MODELS}.{provider}", **model},
        "mixed_precision": mixed_precision(precision, core),
    }
    if data["mixed_precision"]:
        data["mixed_precision"] |= format_of_recipe
    for name in {**_SECTIONS, **given}:
        data[name] = {**_SECTIONS.get(name, {}), **given.get(name, {})}
    data["dataset"].setdefault("sequence_length", model["seq_length"])
    data["tokenizer"].setdefault("vocab_size", model["vocab_size"])
    data["ddp"].setdefault("use_distributed_optimizer", data["optimizer"].get("use_distributed_optimizer", False))
    return data


def mixed_precision(dtype: str, core: str | None = None) -> dict[str, Any] | None:
    """Return the section of a number format; None in fp32. core: as of `container_data`."""
    section = copy.deepcopy(_PRECISIONS[dtype])
    if section and core is not None and core < _GATHERS_FP4_SINCE:
        section.pop("fp4_param_gather", None)
    return section


def use_precision_aware_adam(data: dict[str, Any]) -> None:
    """Use the precision-aware optimizer in bf16, as upstream's launcher does with Adam.

    Megatron-Core 0.19 still keeps fp32 copies of the weights: `optimizer.fp8_recipe` is "tensorwise" in bf16, too. In
    FP8 and FP4 the recipe decides. Requires the distributed optimizer and Adam; without these, in fp32 and for FP8
    weights with delayed scaling, a recipe's 16-bit state is removed too.
    """
    optimizer, precision = data["optimizer"], data["mixed_precision"]
    is_adam = optimizer.get("optimizer", "adam") == "adam"
    keeps_fp8 = precision and precision.get("fp8") and precision.get("fp8_param_gather", precision.get("fp8_param"))
    is_delayed = keeps_fp8 and precision.get("fp8_recipe") == "delayed"
    if precision and is_adam and data["ddp"]["use_distributed_optimizer"] and not is_delayed:
        if not precision.get("fp8") and not precision.get("fp4"):
            optimizer.setdefault("use_precision_aware_optimizer", True)
        return
    for name in ("use_precision_aware_optimizer", *OPTIMIZER_DTYPES):
        optimizer.pop(name, None)


def gather_in_large_buckets(data: dict[str, Any], num_gpus: int) -> None:
    """Reduce and gather in the buckets of upstream's performance recipes; keep existing settings.

    Interleaved stages gather together, and with Adam during the optimizer's step, except with MXFP8 and NVFP4:
    upstream has seen NaN gradients there. num_gpus: ranks of the job.
    """
    model, optimizer, ddp = data["model"], data["optimizer"], data["ddp"]
    optimizer.setdefault("overlap_param_gather", ddp.get("overlap_param_gather", False))
    tp, pp, cp = (model[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context"))
    if num_gpus <= tp * pp * cp or not ddp["use_distributed_optimizer"]:
        return
    if ddp.get("num_buckets") is None:
        ddp.setdefault("bucket_size", _BUCKET_SIZE)
    if pp == 1 or (model.get("virtual_pipeline_model_parallel_size") or 1) == 1 or not ddp.get("overlap_param_gather"):
        return
    ddp.setdefault("align_param_gather", True)
    precision = data["mixed_precision"]
    if not precision or precision.get("fp8_recipe") == "mxfp8" or precision.get("fp4"):
        return
    if optimizer.get("optimizer", "adam") == "adam":
        optimizer.setdefault("overlap_param_gather_with_optimizer_step", True)


_LATENT_ONLY = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "rope_type",
)
