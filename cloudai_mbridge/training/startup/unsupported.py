"""Refuse what this loop does not do, rather than train something else."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.finetuning import GPTFIMDatasetConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.schema.not_done import asked_for


def refuse_unsupported(config: ConfigContainer) -> None:
    """Refuse what the loop would have to ignore.

    Raises:
        ConfigError: one line that names every such field, its value and what asks for nothing.
    """

    def get(section: str, name: str, default: Any) -> Any:
        return getattr(getattr(config, section), name, default)  # a section that is None has no field

    if asked := [*asked_for(get), *_asked_otherwise(config)]:
        raise ConfigError(f"the training loop does not do this yet: {'; '.join(asked)}")


def _asked_otherwise(config: ConfigContainer) -> Iterator[str]:
    model: Any = config.model
    if config.peft is not None:
        yield "peft (remove it)"
    if not isinstance(model, GPTModelProvider):
        yield f"model = {type(model).__name__} (use GPTModelProvider or MLAModelProvider)"
    elif has_transformer_engine() and model.transformer_impl == "local":
        yield "model.transformer_impl = 'local' (Transformer Engine is installed, and used)"
    tp, ep = model.tensor_model_parallel_size, model.expert_model_parallel_size
    if model.num_moe_experts and ep == 1 and (etp := model.expert_tensor_parallel_size or tp) != tp:
        # Megatron-Core reduces the experts' gradients over the groups of the dense layers then
        field = "model.expert_tensor_parallel_size"
        yield f"{field} = {etp} with expert_model_parallel_size = 1 and tensor_model_parallel_size = {tp} (use {tp})"
    if (
        getattr(config.dataset, "skip_getting_attention_mask_from_dataset", True) is False
        and not has_transformer_engine()
    ):
        field = "dataset.skip_getting_attention_mask_from_dataset"
        yield f"{field} = False (use True: without Transformer Engine attention is causal)"
    if isinstance(config.dataset, GPTFIMDatasetConfig):
        yield "dataset = GPTFIMDatasetConfig (use GPTDatasetConfig)"
