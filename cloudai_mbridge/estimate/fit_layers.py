"""Fit what a model says layer by layer to another number of layers: proxies have fewer of them, of the same shapes."""

from typing import Any

_BLOCKS = "M*-EG"
# Fields with an entry for every decoder layer, and those that count the multi-token-prediction layers too
_DECODER_ONLY = ("moe_layer_freq",)
_WITH_PREDICTION = ("window_attn_skip_freq", "linear_attention_freq", "csa_compress_ratios")


def fit_layers(model: dict[str, Any]) -> None:
    """Cut or continue the layer lists and the hybrid pattern of `model` to `num_layers`, in place.

    A list goes on with its last decoder entry; the entries of multi-token-prediction layers, behind them, are kept. A
    hybrid pattern goes on from its beginning. Without multi-token prediction its blocks of a pattern are dropped.
    """
    layers, mtp = model["num_layers"], model["mtp_num_layers"] or 0
    for name in _DECODER_ONLY:
        if isinstance(entries := model.get(name), (list, tuple)):
            model[name] = _cut(entries, layers)
    for name in _WITH_PREDICTION:
        if isinstance(entries := model.get(name), (list, tuple)):
            model[name] = _cut(entries, layers) + list(entries[-1:]) * mtp
    if pattern := model.get("hybrid_layer_pattern"):
        model["hybrid_layer_pattern"] = _fit_pattern(pattern, layers, mtp)


def _cut(entries: list[int] | tuple[int, ...], layers: int) -> list[int]:
    return (list(entries) + list(entries[-1:]) * layers)[:layers]


def _fit_pattern(pattern: str, layers: int, mtp: int) -> str:
    decoder, *prediction = pattern.split("/")
    blocks = [block for block in decoder if block in _BLOCKS]
    if blocks and len(blocks) != layers:
        decoder = "".join((blocks * (layers // len(blocks) + 1))[:layers])
    return "/".join([decoder, *(prediction * mtp)[:mtp]])
