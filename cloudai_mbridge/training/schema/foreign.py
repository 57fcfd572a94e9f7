"""Tables and values of Megatron-Bridge's files that have another form here.

Its providers only give fields other defaults: they are read as GPTModelProvider or MLAModelProvider. Megatron-Bridge
writes every field, so that its files hold the whole model. It checks no types, so that some values of its own recipes
have another type than their field.
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.training.errors import fail, join, show
from cloudai_mbridge.training.schema.forms import Section

_MODELS = "megatron.bridge.models"
# Module -> prefixes of class names -> suffixes; "" is the class of the bare name
_GPT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt_provider": {"GPTProvider": ("126M", "5B", "7B", "20B", "40B", "175B")},
    "llama.llama_provider": {
        "LlamaModelProvider": ("",),
        "Llama2ModelProvider": ("7B", "13B", "70B"),
        "Llama3ModelProvider": ("", "8B", "70B"),
        "CodeLlamaModelProvider": ("7B", "13B", "34B", "70B"),
    },
    "qwen.qwen_provider": {
        "Qwen2ModelProvider": ("", "500M", "1P5B", "7B", "72B"),
        "Qwen25ModelProvider": ("500M", "1P5B", "3B", "7B", "14B", "32B", "72B"),
        "Qwen3ModelProvider": ("", "600M", "1P7B", "4B", "8B", "14B", "32B"),
        "Qwen3MoEModelProvider": ("", "30B_A3B", "235B_A22B"),
    },
    "mistral.mistral_provider": {"MistralModelProvider": ("",), "MistralSmall3ModelProvider": ("24B",)},
    "nemotron.nemotron_provider": {
        "NemotronModelProvider": ("",),
        "Nemotron3ModelProvider": ("4B", "8B", "22B"),
        "Nemotron4ModelProvider": ("15B", "340B"),
    },
    "glm.glm45_provider": {
        "GLMMoEModelProvider": ("",),
        "GLM45ModelProvider": ("355B",),
        "GLM45AirModelProvider": ("106B",),
    },
}
# The same with the frequencies of Llama 3.1, which Megatron-Core's `rope_scaling` computes
_LLAMA_31: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llama.llama_provider": {"Llama31ModelProvider": ("", "8B", "70B", "405B"), "Llama32ModelProvider": ("1B", "3B")},
    "llama_nemotron.llama_nemotron_provider": {"Llama31Nemotron": ("Nano8BProvider", "70BProvider")},
}
_MLA: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "deepseek.deepseek_provider": {
        **{f"DeepSeek{version}": ("ModelProvider", "Provider") for version in ("", "V2", "V2Lite", "V3")},
        "Moonlight": ("ModelProvider16B", "Provider"),
    },
    "kimi.kimi_provider": {"KimiK2Provider": ("",)},
}


def _paths(table: Mapping[str, Mapping[str, tuple[str, ...]]]) -> tuple[str, ...]:
    return tuple(
        f"{_MODELS}.{module}.{start}{end}"
        for module, names in table.items()
        for start, ends in names.items()
        for end in ends
    )


_OF_LLAMA_31 = _paths(_LLAMA_31)
# Path of the class -> name of ours
ARCHITECTURES: Mapping[str, str] = {
    **dict.fromkeys((*_paths(_GPT), *_OF_LLAMA_31), "GPTModelProvider"),
    **dict.fromkeys(_paths(_MLA), "MLAModelProvider"),
}

# Settings of these classes that differ from ours
_OWN_DEFAULTS = frozenset((
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "activation_func",
    "add_bias_linear", "add_qkv_bias", "apply_rope_fusion", "attention_dropout", "attention_softmax_in_fp32",
    "autocast_dtype", "beta_fast", "beta_slow", "bf16", "bias_activation_fusion", "bias_dropout_fusion",
    "cp_comm_type", "cross_entropy_fusion_impl", "cross_entropy_loss_fusion", "ffn_hidden_size", "fp16",
    "gated_linear_unit", "gradient_accumulation_fusion", "hidden_dropout", "hidden_size", "init_method_std",
    "kv_channels", "kv_lora_rank", "layernorm_epsilon", "layernorm_zero_centered_gamma",
    "make_vocab_size_divisible_by", "masked_softmax_fusion", "moe_aux_loss_coeff", "moe_ffn_hidden_size",
    "moe_grouped_gemm", "moe_layer_freq", "moe_permute_fusion", "moe_router_bias_update_rate", "moe_router_dtype",
    "moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_load_balancing_type",
    "moe_router_num_groups", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk",
    "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
    "moe_token_dispatcher_type", "mscale", "mscale_all_dim", "mtp_loss_scaling_factor", "mtp_num_layers",
    "multi_latent_attention", "normalization", "num_attention_heads", "num_layers",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "num_moe_experts", "num_query_groups",
    "params_dtype", "persist_layer_norm", "position_embedding_type", "q_lora_rank", "qk_head_dim", "qk_layernorm",
    "qk_pos_emb_head_dim", "rotary_base", "rotary_percent", "seq_length", "share_embeddings_and_output_weights",
    "transformer_layer_spec", "v_head_dim", "vocab_size", "window_size",
))  # fmt: skip
_LLAMA_31_FACTORS = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}

# 0.19 has one field for both dispatchers, and refuses the defaults of 0.16
_NEW_SMS = "moe_flex_dispatcher_num_sms"
_OLD_SMS = {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16}

# Layers of a model that mixes dense and MoE layers: `default_layer_spec` builds them here for any model
_BLOCK_SPEC = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
_DEFAULT_SPEC = f"{_MODELS}.gpt_provider.default_layer_spec"


def translate_provider(table: Mapping[Any, Any], section: Section, where: str) -> Mapping[Any, Any]:
    """Return the table of a model that Megatron-Bridge wrote as one of our class; any other table as it is.

    ConfigError: a field is missing whose default the class sets, or Megatron-Core has no such frequencies.
    """
    target = table.get("_target_")
    if not isinstance(target, str) or not target.startswith(_MODELS):
        return table
    if target in ARCHITECTURES and (missing := sorted(_OWN_DEFAULTS & set(section.fields) - set(table))):
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        text = f"{target.rpartition('.')[2]} is read with all fields that Megatron-Bridge writes; {names} is missing"
        fail(where, f"{text}; add it, or use {ARCHITECTURES[target]}")
    if _is_block_spec(table.get("transformer_layer_spec")):
        table = {**table, "transformer_layer_spec": _DEFAULT_SPEC}
    if type(base := table.get("rotary_base")) is float and base.is_integer():
        table = {**table, "rotary_base": int(base)}  # Hugging Face has it as a float
    if _NEW_SMS in section.fields and table.get(_NEW_SMS) is None and _OLD_SMS.items() <= table.items():
        table = {key: item for key, item in table.items() if key not in _OLD_SMS}
    if target not in _OF_LLAMA_31:
        return table
    for name, only in _LLAMA_31_FACTORS.items():
        if table.get(name) != only:
            fail(join(where, name), f"{show(table.get(name))} is not possible here; use {only}")
    if "scale_factor" not in table:
        fail(where, "missing key scale_factor")
    rest = {key: item for key, item in table.items() if key not in ("scale_factor", *_LLAMA_31_FACTORS)}
    return {**rest, "rope_scaling": True, "rope_scaling_factor": table["scale_factor"]}


def _is_block_spec(value: object) -> bool:
    if not isinstance(value, dict) or value.get("_target_") != _BLOCK_SPEC:
        return False
    filled_in = {key: item for key, item in value.items() if key not in ("_target_", "_partial_", "_args_")}
    return not value.get("_args_") and set(filled_in) <= {"use_transformer_engine"}


def as_meant(path: str, field: str, value: Any) -> Any:
    """Return the value of the class at `path` in the field's own type; any other value as it is."""
    match path.rpartition(".")[2], field, value:
        case "TrainingConfig", "manual_gc_eval", int():
            return value != 0
        case "PipelineOverlapCfg", "fp8_buf", [False]:  # a comma too many in the class's default
            return False
        case _, "moe_router_dtype", {"_target_": "torch.float32"}:
            return "fp32"
        case _, "moe_router_dtype", "bf16":  # Megatron-Core treats unknown values as the type of the layer
            return None
    return value
