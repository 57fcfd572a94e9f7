"""Rules of context parallelism: how a sequence is split, and how the parts communicate."""

import math
from typing import TYPE_CHECKING

from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def check_sequence_split(config: "ConfigContainer") -> None:
    """Check that the sequence splits evenly, and that no rank divides a fine-tuning loss by its own token count.

    Each rank takes one piece from either end of the sequence, so that causal attention costs all of them the same. In
    fine-tuning all tokens of a rank's pieces may be masked: a mean per rank would then be 0/0.

    AssertionError: context parallel size > 1 and one of the rules is broken.
    """
    model, cp = config.model, getattr(config.model, "context_parallel_size", 1)
    if cp <= 1:
        return
    assert model.seq_length % (2 * cp) == 0, (
        f"model.seq_length ({model.seq_length}) must be divisible by 2 x context_parallel_size ({cp})"
    )
    if isinstance(config.dataset, FinetuningDatasetConfig):
        assert model.calculate_per_token_loss, (
            f"fine-tuning with context_parallel_size {cp} requires model.calculate_per_token_loss=True"
        )
        assert not config.ddp.average_in_collective, (
            f"fine-tuning with context_parallel_size {cp} requires ddp.average_in_collective=False"
        )


def check_cp_comm_type(config: "ConfigContainer") -> None:
    """Check the kind of context-parallel communication against the layers and the hierarchical group sizes.

    AssertionError: a list that is not one entry per layer, a value of another type, the hierarchical kind without
        group sizes, or group sizes whose product is not the context parallel size.
    """
    model = config.model
    cp, comm_type = getattr(model, "context_parallel_size", 1), getattr(model, "cp_comm_type", None)
    kinds = comm_type if isinstance(comm_type, list) else [comm_type]
    if cp > 1 and isinstance(comm_type, list):
        assert len(kinds) == model.num_layers, (
            f"model.cp_comm_type has {len(kinds)} entries, but there are {model.num_layers} layers; give one per layer"
        )
    elif cp > 1:
        assert comm_type is None or isinstance(comm_type, str), (
            f"model.cp_comm_type must be a string or a list of strings, got {type(comm_type).__name__}"
        )
    sizes = getattr(model, "hierarchical_context_parallel_sizes", None)
    if any("a2a+p2p" in kind for kind in kinds if isinstance(kind, str)):
        # without the sizes the parts of a sequence would not communicate, and nothing would report it
        assert sizes is not None, (
            "model.cp_comm_type 'a2a+p2p' requires model.hierarchical_context_parallel_sizes, "
            "for example [8, 2] for a context_parallel_size of 16"
        )
    if sizes is not None:
        assert math.prod(sizes) == cp, (
            f"the product of model.hierarchical_context_parallel_sizes {sizes} is {math.prod(sizes)}, "
            f"but context_parallel_size is {cp}"
        )
