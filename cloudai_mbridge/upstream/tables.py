"""Names of Megatron-Bridge and the modules that serve them."""

_DATA = {"training.config.dataset": "DataloaderConfig DatasetBuildContext DatasetProvider"}
_SFT = {
    "training.config.sft": "ChatSFTPreprocessingConfig GPTSFTDatasetConfig HFDatasetSourceConfig"
    " PromptCompletionSFTPreprocessingConfig"
}
_FINETUNING = {"training.config.finetuning": "FinetuningDatasetConfig"}
_PACKING = {"training.config.finetuning": "PackedSequenceSpecs"}
_HYBRID = {"training.models.hybrid_provider": "HybridModelProvider MambaModelProvider"}
_HERE = "upstream.names"

# Module -> home -> names, all below this package; modules with submodules are packages
MODULES: dict[str, dict[str, str]] = {
    "data": {**_DATA, **_SFT},
    "data.base": _DATA,
    "data.builders": {**_SFT, **_FINETUNING},
    "data.builders.gpt_sft": {"training.config.sft": "GPTSFTDatasetConfig", **_FINETUNING},
    "data.datasets": {},
    "data.datasets.packed_sequence": _PACKING,
    "data.packing": _PACKING,
    "data.packing.config": _PACKING,
    "data.sft_processing": {"training.config.sft": "ChatSFTPreprocessingConfig PromptCompletionSFTPreprocessingConfig"},
    "data.sources": {},
    "data.sources.hf": {"training.config.sft": "HFDatasetSourceConfig"},
    "models.gpt_provider": {
        "training.models.gpt_provider": "GPTModelProvider",
        "training.models.layer_specs": "default_layer_spec local_layer_spec modelopt_transformer_layer_spec",
    },
    "models.hybrid": {"training.models.hybrid_provider": "HybridModelProvider"},
    "models.hybrid.hybrid_provider": {"training.models.hybrid_provider": "HybridModelProvider"},
    "models.mamba": {},
    "models.mamba.mamba_provider": _HYBRID,
    "models.mla_provider": {"training.models.gpt_provider": "MLAModelProvider"},
    "models.t5_provider": {"training.models.other_providers": "T5ModelProvider"},
    "peft": {},
    "peft.canonical_lora": {"training.peft.config": "CanonicalLoRA"},
    "peft.dora": {"training.peft.config": "DoRA"},
    "peft.lora": {"training.peft.config": "LoRA"},
    "recipes.utils": {},
    "recipes.utils.optimizer_utils": {
        _HERE: "distributed_fused_adam_with_cosine_annealing distributed_fused_adam_with_cosine_annealing_samples"
    },
    "recipes.utils.tokenizer_utils": {_HERE: "DEFAULT_NULL_TOKENIZER_VOCAB_SIZE"},
    "utils": {},
    "utils.common_utils": {
        "training.config.text.summary": "print_rank_0 warn_rank_0",
        _HERE: "get_last_rank get_local_rank_preinit get_rank_safe get_world_size_safe is_last_rank print_rank_last",
    },
}
# Names of a package that exists here with other contents: package -> home -> names
MORE: dict[str, dict[str, str]] = {
    "models": {
        "training.models.gpt_provider": "GPTModelProvider MLAModelProvider",
        **_HYBRID,
        "training.models.other_providers": "T5ModelProvider",
    }
}
# Packages below `recipes`: Megatron-Bridge's families. Their functions are served by `upstream.served`
FAMILIES = ("deepseek", "gpt", "gpt_oss", "kimi", "llama", "nemotronh", "qwen")
