"""What Megatron-Bridge reads from Hugging Face, without a network: the published `config.json` of models.

Of these files Megatron-Bridge's own bridges make the real model configuration; which fusions, router and dispatcher a
model has comes from their code. Of a model without a file here only what its layers are is set, on a bare provider.
"""

import importlib
from types import SimpleNamespace
from typing import Any

File = dict[str, Any]
_BRIDGES = "megatron.bridge.models"
_ALL: File = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
_LLAMA: File = _ALL | {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "mlp_bias": False,
}  # fmt: skip
_LLAMA_31: File = _LLAMA | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_QWEN: File = _ALL | {
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_LATENT: File = _ALL | {
    "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rms_norm_eps": 1e-06,
}  # fmt: skip
_YARN: File = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
_GPT_OSS: File = _ALL | {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.9,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
# GLM 5 and 5.1: the defaults of transformers' GlmMoeDsaConfig, whose checkpoint is zai-org/GLM-5, and of xLLM
# for that file. What 5.2 has otherwise: Megatron-LM's lite reader, and manifests of its checkpoint
_GLM_5: File = _ALL | {
    "num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880, "max_position_embeddings": 202752,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256,
    "v_head_dim": 256, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_GLM_52: File = _GLM_5 | {
    "max_position_embeddings": 1048576, "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"},
    "index_topk_freq": 4, "index_skip_topk_offset": 3,
}  # fmt: skip
_NEMOTRON: File = _ALL | {
    "hidden_act": None, "mlp_hidden_act": "relu2", "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-05, "mlp_bias": False, "use_bias": False,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
}  # fmt: skip


def _sizes(layers: int, hidden: int, ffn: int, heads: int, **others: Any) -> File:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads}
    return sizes | others


_LLAMA_BRIDGE = "llama.llama_bridge.LlamaBridge"
_QWEN_BRIDGE = "qwen.qwen3_moe_bridge.Qwen3MoEBridge"
_GPT_OSS_BRIDGE = "gpt_oss.gpt_oss_bridge.GPTOSSBridge"
_GLM_BRIDGE = "glm_moe_dsa.glm5_bridge.GLM5Bridge"
_NEMOTRON_BRIDGE = "nemotronh.nemotron_h_bridge.NemotronHBridge"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# name on Hugging Face -> bridge, what its file holds
FILES: dict[str, tuple[str, File]] = {
    "meta-llama/Meta-Llama-3-8B": (_LLAMA_BRIDGE, _LLAMA | _sizes(32, 4096, 14336, 32)),
    "meta-llama/Meta-Llama-3-70B": (_LLAMA_BRIDGE, _LLAMA | _sizes(80, 8192, 28672, 64)),
    "meta-llama/Meta-Llama-3.1-405B": (_LLAMA_BRIDGE, _LLAMA_31 | _sizes(126, 16384, 53248, 128)),
    "Qwen/Qwen3-30B-A3B": (_QWEN_BRIDGE, _QWEN | _sizes(48, 2048, 6144, 32, moe_intermediate_size=768)),
    "Qwen/Qwen3-235B-A22B": (_QWEN_BRIDGE, _QWEN | _sizes(94, 4096, 12288, 64, moe_intermediate_size=1536)),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen.qwen3_next_bridge.Qwen3NextBridge",
        _QWEN | _sizes(
            48, 2048, 5120, 16, num_key_value_heads=2, head_dim=256, rope_theta=10000000.0, num_experts=512,
            num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            max_position_embeddings=262144, partial_rotary_factor=0.25, full_attention_interval=4,
            linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            linear_conv_kernel_dim=4, decoder_sparse_step=1, mlp_only_layers=[],
        ),
    ),
    "openai/gpt-oss-20b": (_GPT_OSS_BRIDGE, _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
    "openai/gpt-oss-120b": (_GPT_OSS_BRIDGE, _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek-ai/DeepSeek-V3": (
        "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge",
        _LATENT | {
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
            "max_position_embeddings": 163840, "rope_theta": 10000.0, "first_k_dense_replace": 3, "n_group": 8,
            "rope_scaling": {**_YARN, "beta_fast": 32, "beta_slow": 1, "factor": 40}, "topk_group": 4,
            "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        },
    ),
    "moonshotai/Kimi-K2-Instruct": (
        "kimi.kimi_bridge.KimiK2Bridge",
        _LATENT | {
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384,
            "max_position_embeddings": 131072, "rope_theta": 50000.0, "first_k_dense_replace": 1, "n_group": 1,
            "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "topk_group": 1,
            "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "aux_loss_alpha": 0.001,
        },
    ),
    "zai-org/GLM-5.1": (_GLM_BRIDGE, _GLM_5),
    "zai-org/GLM-5.2": (_GLM_BRIDGE, _GLM_52),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        _NEMOTRON_BRIDGE,
        _NEMOTRON | _sizes(
            88, 4096, 2688, 32, hybrid_override_pattern=_SUPER, mamba_num_heads=128, moe_intermediate_size=2688,
            moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
        ),
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (
        _NEMOTRON_BRIDGE,
        _NEMOTRON | _sizes(
            108, 8192, 5120, 64, hybrid_override_pattern=_ULTRA, mamba_num_heads=256, moe_intermediate_size=5120,
            moe_shared_expert_intermediate_size=10240, moe_latent_size=2048,
        ),
    ),
}  # fmt: skip
# Without a file here: beginning of the name -> what the layers are, of no particular size
_LAYERS: dict[str, File] = {
    "Qwen/Qwen3-Next": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "num_layers": 48,
    },
    "deepseek-ai/DeepSeek-V4": {"experimental_attention_variant": "dsv4_hybrid", "multi_latent_attention": True},
    "Qwen/": {},
}


def provider_of(name: str) -> Any:
    """Return the model configuration that Megatron-Bridge makes of a model on Hugging Face."""
    if name not in FILES:
        return _bare_provider(name)
    path, values = FILES[name]
    module, _, attribute = path.rpartition(".")
    bridge = getattr(importlib.import_module(f"{_BRIDGES}.{module}"), attribute)()
    return bridge.provider_bridge(SimpleNamespace(config=SimpleNamespace(**values)))


def _bare_provider(name: str) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    layers = next(fields for start, fields in _LAYERS.items() if name.startswith(start))
    sizes = {"num_layers": 64, "hidden_size": 64, "num_attention_heads": 64, "num_moe_experts": 128}
    provider = GPTModelProvider(**sizes, seq_length=1, vocab_size=128)
    for field, value in layers.items():
        setattr(provider, field, value)
    return provider
