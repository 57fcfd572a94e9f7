"""served"""

from collections.abc import Callable, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from cloudai_mbridge.training.upstream import ServedModule, missing
from cloudai_mbridge.training.upstream.absent import refusal

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
# Packages below `recipes`: Megatron-Bridge's families. Their functions are served by `RecipeModule`
FAMILIES = ("deepseek", "gpt", "gpt_oss", "kimi", "llama", "nemotronh", "qwen")


_PRETRAIN, _FINETUNE = "_pretrain_config", ("_sft_config", "_peft_config")


class RecipeModule(ModuleType):
    """A module of any family: `NAME_pretrain_config` is there for every recipe NAME that is shipped."""

    def __getattr__(self, name: str) -> Any:
        recipe = name.removesuffix(_PRETRAIN)
        if name.startswith("__") or not name.endswith((_PRETRAIN, *_FINETUNE)):
            raise missing(self.__name__, name)
        from cloudai_mbridge.recipes import recipe_names

        if name.endswith(_PRETRAIN) and recipe in recipe_names():
            return _function(recipe)
        raise ImportError(_line(f"{self.__name__}.{name}", name, recipe_names()))


def _line(full: str, name: str, shipped: list[str]) -> str:
    kind = next(end for end in (_PRETRAIN, *_FINETUNE) if name.endswith(end))
    recipe = name.removesuffix(kind)
    if recipe not in shipped:
        return f"{full} is absent on purpose: the recipes that are shipped are {', '.join(shipped)}"
    return f"{full} is absent on purpose: take {recipe}{_PRETRAIN} and set `dataset`, `peft` and `checkpoint` of it"


def _function(recipe: str) -> Callable[[], Any]:
    def config() -> Any:
        from cloudai_mbridge.recipes import load_recipe
        from cloudai_mbridge.recipes.container import container_data
        from cloudai_mbridge.training.config import ConfigContainer

        return ConfigContainer.from_dict(container_data(load_recipe(recipe).sections))

    config.__name__ = config.__qualname__ = f"{recipe}{_PRETRAIN}"
    config.__doc__ = f"Return the configuration of the recipe {recipe}, on one GPU and with mock data."
    return config


def spec_of(full_name: str, below: str) -> ModuleSpec | None:
    """Return the spec of a module, None if no table has it. Raises ModuleNotFoundError: absent on purpose."""
    top, _, rest = below.partition(".")
    if below in MODULES or (top == "recipes" and rest.partition(".")[0] in FAMILIES):
        return ModuleSpec(full_name, _Loader(), is_package=True)
    if line := refusal(full_name):
        raise ModuleNotFoundError(line)  # with a name, `from package import module` would hide the line
    return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, _, below = spec.name.partition(".")
        if below not in MODULES:
            return RecipeModule(spec.name)
        return ServedModule(spec.name, homes_in(package, MODULES[below]))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a name is imported on first access."""


def homes_in(package: str, homes: Mapping[str, str]) -> dict[str, str]:
    """Return the table with the full names of homes."""
    return {f"{package}.{home}": names for home, names in homes.items()}
