"""Configurations in which attention would not (automatically) end with a document: Megatron-Core reports no error."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine, modelopt_transformer_layer_spec


def asked_of_documents(config: ConfigContainer) -> Iterator[str]:
    """Yield a message for each invalid combination."""
    dataset: Any = config.dataset
    if getattr(dataset, "reset_attention_mask", False):
        yield from _of_masks(config.model, dataset)
    if getattr(dataset, "inter_document_masking", False):
        yield from _of_bounds(config)


def _of_masks(model: Any, dataset: Any) -> Iterator[str]:
    spec = getattr(model, "transformer_layer_spec", None)
    if has_transformer_engine() and spec is not modelopt_transformer_layer_spec:
        yield "dataset.reset_attention_mask = True (use False: causal attention of Transformer Engine takes no mask)"
    elif dataset.skip_getting_attention_mask_from_dataset or not dataset.create_attention_mask:
        yield (
            "dataset.reset_attention_mask = True without a mask (use False, or set create_attention_mask = True and"
            " skip_getting_attention_mask_from_dataset = False)"
        )


def _of_bounds(config: ConfigContainer) -> Iterator[str]:
    """Yield layouts that cannot hold documents of any length: several rows, and the parts of a sequence."""
    sizes = {
        "train.micro_batch_size": config.train.micro_batch_size,
        "validation.eval_micro_batch_size": config.eval_batch_sizes[1],
        "model.context_parallel_size": config.model.context_parallel_size,
    }
    for field, size in sizes.items():
        if size != 1:
            yield f"{field} = {size} with dataset.inter_document_masking = True (use 1)"
