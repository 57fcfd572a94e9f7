"""The bytes that a part of the model keeps from its forward pass for its backward pass, by what can free them."""

from dataclasses import dataclass, fields
from operator import attrgetter


@dataclass(frozen=True)
class SavedBytes:
    """One half of a layer: a norm, and the attention or feed-forward network behind it. Bytes of one micro-batch.

    norm: the norm's input and statistics. norm_output: its output, which the next products keep. latents: of
    multi-latent attention, what queries, keys and values are projected from. projected: those. core: scores or their
    sums, and what else only the core attention keeps. output: what the last projection keeps. ffn: inside of an MLP.
    router: routing and dispatch. experts: inside of the routed experts; expert_hidden: of that, what their activation
    function reads; expert_activation: what their second product does. shared: inside of the shared experts.
    """

    norm: float = 0
    norm_output: float = 0
    latents: float = 0
    projected: float = 0
    core: float = 0
    output: float = 0
    ffn: float = 0
    router: float = 0
    experts: float = 0
    expert_hidden: float = 0
    expert_activation: float = 0
    shared: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(_VALUES(self)))


_VALUES = attrgetter(*(field.name for field in fields(SavedBytes)))
