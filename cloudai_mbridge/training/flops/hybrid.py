"""Hybrid models by a pattern of blocks: `M` Mamba, `*` attention (without an MLP), `-` MLP, `E` MoE, `G` Gated
DeltaNet; `|` separates pipeline stages, `/` begins a block of multi-token prediction. FLOPs per token."""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.training.flops.attention import grouped_query_layers
from cloudai_mbridge.training.flops.linear_attention import gated_delta_net
from cloudai_mbridge.training.flops.mlp import dense_mlp, experts, logits, projections
from cloudai_mbridge.training.flops.quantities import Cost, Formula, Lengths, read

SYMBOLS = "M*-EG"


@dataclass(frozen=True)
class HybridPattern:
    """The symbols of the decoder and of every multi-token-prediction block."""

    decoder: str
    prediction: tuple[str, ...] = ()

    @property
    def symbols(self) -> str:
        """All layers, prediction included."""
        return self.decoder + "".join(self.prediction)


def parse_pattern(text: str) -> HybridPattern:
    """Read a pattern such as `M*-M|ME/*E`. Raises ValueError: it has other symbols."""
    if unknown := sorted(set(text) - set(SYMBOLS + "|/")):
        raise ValueError(f"hybrid_layer_pattern: {unknown} are not layers; use {', '.join(SYMBOLS)}, | and /")
    decoder, *prediction = text.replace("|", "").split("/")
    return HybridPattern(decoder, tuple(prediction))


def pattern_of(model: Any) -> HybridPattern:
    """Return the model's pattern; without one, `hybrid_attention_ratio` and `hybrid_mlp_ratio` divide its layers."""
    if text := read(model, "hybrid_layer_pattern") or read(model, "hybrid_override_pattern"):
        return parse_pattern(text)
    layers = int(model.num_layers)
    attention = round(layers * read(model, "hybrid_attention_ratio", 0))
    mlp = round(layers * read(model, "hybrid_mlp_ratio", 0))
    return HybridPattern("*" * attention + "-" * mlp + "M" * (layers - attention - mlp))


def is_hybrid(model: Any) -> bool:
    """Return whether the model's layers follow a pattern of blocks of the kinds above."""
    if read(model, "hybrid_attention_layers_include_mlp", False):
        return False  # such a model writes `*` for whole transformer layers
    return bool(read(model, "is_hybrid_model", False) or read(model, "hybrid_layer_pattern"))


def hybrid(model: Any, lengths: Lengths, formula: Formula, mtp: int | None) -> Cost:
    """The whole model. mtp: number of multi-token-prediction blocks, instead of the pattern's; None: as configured."""
    pattern = pattern_of(model)
    if mtp is not None:
        pattern = HybridPattern(pattern.decoder, (pattern.prediction[:1] * mtp)[:mtp])
    depths = read(model, "mtp_num_layers", len(pattern.prediction)) if mtp is None else mtp
    count = {symbol: pattern.symbols.count(symbol) for symbol in SYMBOLS}
    num_projections = projections(model)
    # prediction blocks always attend to everything, and the output gate is not counted
    windowed = [number for number, symbol in enumerate(pattern.decoder, 1) if symbol == "*"]
    attention = grouped_query_layers(model, lengths, formula, count["*"], windowed, with_gate=False)
    cost = attention + logits(model, depths)
    for symbol, block in (("-", dense_mlp), ("E", experts)):
        if count[symbol]:
            cost += block(model, num_projections) * count[symbol]
    for symbol, mixer in (("M", mamba), ("G", gated_delta_net)):
        if count[symbol]:
            cost += mixer(model) * count[symbol]
    return cost


def mamba(model: Any) -> Cost:
    """One Mamba-2 layer (arXiv 2405.21060).

    The inner width is 2h as in the reference, whatever `mamba_num_heads` x `mamba_head_dim` is (see docs/models.md).
    """
    h, state = model.hidden_size, read(model, "mamba_state_dim", 128)
    inner = 2 * h
    heads = read(model, "mamba_num_heads") or inner // read(model, "mamba_head_dim", 64)
    projected = 2 * inner + 2 * read(model, "mamba_num_groups", 8) * state + heads
    return Cost(6 * h * projected + 6 * inner * h, 21 * inner * state)
