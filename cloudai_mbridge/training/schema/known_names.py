"""Everything that `_target_` in a config file may name: names only, nothing is imported.

A file can make the loader neither import nor call anything else. Extend these tables, not the loader.
"""

from collections.abc import Mapping

from cloudai_mbridge.training.schema.foreign import ARCHITECTURES

_PACKAGE = "cloudai_mbridge.training"

# Of the optimizer's state; other types than fp32 need Transformer Engine's Adam
OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")

CONTAINER = f"{_PACKAGE}.config.container.ConfigContainer"

# The single table of config classes: module below cloudai_mbridge.training -> classes
CONFIG_MODULES: Mapping[str, tuple[str, ...]] = {
    "config.rng": ("RNGConfig",),
    "config.profiling": ("ProfilingConfig", "TensorInspectConfig"),
    "config.dist": ("DistributedInitConfig",),
    "config.rerun": ("RerunStateMachineConfig",),
    "config.resilience": (
        "FaultToleranceConfig",
        "StragglerDetectionConfig",
        "NVRxStragglerDetectionConfig",
        "InProcessRestartConfig",
    ),
    "config.train": ("TrainingConfig", "ValidationConfig"),
    "config.scheduler": ("SchedulerConfig",),
    "config.logger": ("LoggerConfig",),
    "config.checkpoint": ("CheckpointConfig",),
    "config.optimizer": ("OptimizerConfig", "OptimizerConfigOverrideProvider"),
    "config.ddp": ("DistributedDataParallelConfig",),
    "config.dataset": (
        "DataloaderConfig",
        "DatasetProvider",
        "GPTDatasetConfig",
        "MockGPTDatasetConfig",
        "SyntheticGPTDatasetConfig",
    ),
    "config.finetuning": ("FinetuningDatasetConfig", "GPTFIMDatasetConfig", "PackedSequenceSpecs"),
    "config.sft": (
        "GPTSFTDatasetConfig",
        "HFDatasetSourceConfig",
        "ChatSFTPreprocessingConfig",
        "PromptCompletionSFTPreprocessingConfig",
    ),
    "config.container": ("ConfigContainer",),
    "tokenizers.config": ("TokenizerConfig",),
    "mixed_precision": ("MixedPrecisionConfig",),
    "comm_overlap.config": ("CommOverlapConfig",),
    "comm_overlap.user_buffers": (
        "TransformerLayerTPOverlapCfg",
        "TPOverlapCfg",
        "PipelineOverlapCfg",
        "RingExchangeOverlapCfg",
        "BulkOverlapCfg",
    ),
    "models.gpt_provider": ("GPTModelProvider", "MLAModelProvider"),
    "models.hybrid_provider": ("HybridModelProvider", "MambaModelProvider"),
    "models.other_providers": ("T5ModelProvider", "MIMOProvider"),
    "models.quantization": ("RecipeConfig", "GlobMatcher"),
    "peft.config": ("LoRA", "DoRA", "CanonicalLoRA"),
}

# Counterparts of our classes in Megatron-Bridge, Megatron-LM and Megatron-Core
_REFERENCE_MODULES: Mapping[str, tuple[str, ...]] = {
    "models.quantization": ("megatron.core.quantization.quant_config",),
    "peft.config": tuple(f"megatron.bridge.peft.{name}" for name in ("lora", "dora", "canonical_lora")),
    "tokenizers.config": ("megatron.bridge.training.tokenizers.config",),
    "mixed_precision": ("megatron.bridge.training.mixed_precision",),
    "comm_overlap.config": ("megatron.bridge.training.comm_overlap",),
    "comm_overlap.user_buffers": ("megatron.bridge.training.comm_overlap",),
    "models.gpt_provider": ("megatron.bridge.models.gpt_provider", "megatron.bridge.models.mla_provider"),
    "models.hybrid_provider": (
        "megatron.bridge.models.hybrid.hybrid_provider",
        "megatron.bridge.models.mamba.mamba_provider",
    ),
    "models.other_providers": ("megatron.bridge.models.t5_provider", "megatron.bridge.models.mimo.mimo_provider"),
}
# Since Megatron-Bridge 0.4 some classes are Megatron-LM's own
_REFERENCE_CONFIG = (
    "megatron.bridge.training.config",
    "megatron.training.config",
    *(f"megatron.training.config.{name}_config" for name in ("common", "resilience", "training")),
)
_REFERENCE_EXTRA: Mapping[str, tuple[str, ...]] = {
    "OptimizerConfig": ("megatron.core.optimizer", "megatron.core.optimizer.optimizer_config"),
    "DistributedDataParallelConfig": (
        "megatron.core.distributed",
        "megatron.core.distributed.distributed_data_parallel_config",
    ),
    "GPTDatasetConfig": ("megatron.core.datasets.gpt_dataset",),
    "PackedSequenceSpecs": ("megatron.bridge.data.datasets.packed_sequence", "megatron.bridge.data.packing.config"),
    "GPTSFTDatasetConfig": ("megatron.bridge.data.builders.gpt_sft", "megatron.bridge.data.builders"),
    "HFDatasetSourceConfig": ("megatron.bridge.data.sources.hf",),
    "ChatSFTPreprocessingConfig": ("megatron.bridge.data.sft_processing",),
    "PromptCompletionSFTPreprocessingConfig": ("megatron.bridge.data.sft_processing",),
}

# Keys that a class takes under a second name: (class name, second name) -> field. Subclasses take them as well.
KEY_ALIASES: Mapping[str, Mapping[str, str]] = {
    "GPTDatasetConfig": {"seq_length": "sequence_length"},
    "DistributedInitConfig": {"lazy_init": "lazy_mpu_init"},
}

# Fields whose annotation is too wide -> the classes that a file may give there; none: only null. A table without
# `_target_` is read as the first.
FIELD_CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ConfigContainer": {
        "model": (
            *("GPTModelProvider", "MLAModelProvider", "HybridModelProvider", "MambaModelProvider"),
            *("T5ModelProvider", "MIMOProvider"),
        ),
        "peft": ("LoRA", "DoRA", "CanonicalLoRA"),
    },
    "MIMOProvider": {"language_model": ("GPTModelProvider", "MLAModelProvider")},
}

# Values that no supported release of Megatron-Core has, and Megatron-Bridge's recipes do -> the release that will
LATER_VALUES: Mapping[str, str] = {"dsv4_hybrid": "newer than 0.19"}

# Fields that belong to the process, not to the run: a file would force one rank's value on all
PROCESS_FIELDS = ("local_rank",)
# Slots that the training loop fills with objects of the running program: left out of files
RUNTIME_FIELDS = (
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "tokenizer",
)

_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("float", "half", "double"),
)
DTYPES = tuple(f"torch.{name}" for name in _DTYPE_NAMES)
# Short names -> torch's (Megatron-Bridge, utils/activation_map.py)
_SHORT_DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("fp32", "32", "32-true"), "float32"),
    **dict.fromkeys(("fp16", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    "fp8": "float8_e4m3fn",
}

_INIT_NAMES = (
    *("normal_", "uniform_", "trunc_normal_", "constant_", "zeros_", "ones_", "orthogonal_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)
_LAYER_SPECS = f"{_PACKAGE}.models.layer_specs"
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "torch.nn.functional": ("gelu", "silu", "relu", "relu6", "sigmoid", "softplus", "tanh", "mish"),
    "torch": ("sigmoid", "tanh", "relu"),
    "torch.nn.init": _INIT_NAMES,
    "megatron.core.activations": ("squared_relu", "quick_gelu", "fast_gelu"),
    _LAYER_SPECS: ("default_layer_spec", "local_layer_spec", "modelopt_transformer_layer_spec"),
}
# name in a file -> (module, attribute)
FUNCTIONS: Mapping[str, tuple[str, str]] = {
    **{f"{module}.{name}": (module, name) for module, names in _FUNCTIONS.items() for name in names},
    # as Megatron-Bridge writes them
    "torch._C._nn.gelu": ("torch.nn.functional", "gelu"),
    # another function than that of `activations`: Megatron-Core fuses the bias with this one only
    "megatron.core.fusions.fused_bias_geglu.quick_gelu": ("megatron.core.fusions.fused_bias_geglu", "quick_gelu"),
    "megatron.bridge.models.gpt_provider.default_layer_spec": (_LAYER_SPECS, "default_layer_spec"),
    "megatron.bridge.models.gpt_provider.transformer_engine_layer_spec": (_LAYER_SPECS, "default_layer_spec"),
    # the result of `default_layer_spec` for a model with such a variant
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec": (_LAYER_SPECS, "default_layer_spec"),
    "megatron.bridge.models.gpt_provider.local_layer_spec": (_LAYER_SPECS, "local_layer_spec"),
    "megatron.bridge.models.gpt_provider.modelopt_transformer_layer_spec": (
        _LAYER_SPECS,
        "modelopt_transformer_layer_spec",
    ),
    "megatron.bridge.models.nemotron.nemotron_provider.squared_relu": ("megatron.core.activations", "squared_relu"),
}
# Short names of activation functions -> names of FUNCTIONS (Megatron-Bridge, utils/activation_map.py)
ACTIVATIONS: Mapping[str, str] = {
    **{name: f"torch.nn.functional.{name}" for name in ("gelu", "relu", "silu", "sigmoid")},
    "tanh": "torch.tanh",
    **dict.fromkeys(("relu2", "squared_relu"), "megatron.core.activations.squared_relu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "fast_gelu"), "megatron.core.activations.fast_gelu"),
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
}
# Functions of FUNCTIONS that may be given with numbers already filled in (`_partial_: true`)
PARTIAL_PREFIX = "torch.nn.init."

ENUMS: Mapping[str, tuple[str, str]] = {
    "signal.Signals": ("signal", "Signals"),
    **{
        f"megatron.core.transformer.enums.{name}": ("megatron.core.transformer.enums", name)
        for name in ("AttnBackend", "CudaGraphScope", "CudaGraphModule", "InferenceCudaGraphScope")
    },
}


def _class_paths() -> dict[str, str]:
    """Map every accepted spelling of a config class to its path in this package."""
    paths: dict[str, str] = {}
    for module, names in CONFIG_MODULES.items():
        for name in names:
            own = f"{_PACKAGE}.{module}.{name}"
            references = _REFERENCE_MODULES.get(module, _REFERENCE_CONFIG) + _REFERENCE_EXTRA.get(name, ())
            package = module.partition(".")[0]
            prefixes = (f"{_PACKAGE}.{package}", *references)
            paths.update(dict.fromkeys((own, name, *(f"{prefix}.{name}" for prefix in prefixes)), own))
    return paths | {path: paths[name] for path, name in ARCHITECTURES.items()}


CLASS_PATHS: Mapping[str, str] = _class_paths()


def dtype_name(name: str) -> str:
    """Return torch's full name of a dtype that may be given by a shorter one; other names get a `torch.` in front."""
    bare = name.removeprefix("torch.")
    return f"torch.{_SHORT_DTYPES.get(bare, bare)}"


def is_foreign(target: str) -> bool:
    """Return whether Megatron-Bridge or Megatron-Core wrote this table, which then contains computed fields as well."""
    return target.startswith("megatron.")


def kind_of_target(target: object) -> str:
    """Name the kind of thing a `_target_` stands for: dtype, callable, enum, path, tuple, config; "" is refused."""
    if not isinstance(target, str):
        return ""
    tables = (
        ("dtype", DTYPES),
        ("callable", FUNCTIONS),
        ("enum", ENUMS),
        ("path", ("pathlib.Path", "pathlib.PosixPath")),
        ("tuple", ("tuple",)),
        ("config", CLASS_PATHS),
    )
    return next((kind for kind, table in tables if target in table), "")
