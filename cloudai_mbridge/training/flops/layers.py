"""Kinds of layers: experts, sliding windows, linear attention. Lists have an entry for every layer."""

from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.training.flops.quantities import read


def mtp_layers(model: Any) -> int:
    """Return the number of multi-token-prediction layers."""
    return int(read(model, "mtp_num_layers", 0))


def moe_layer_pattern(model: Any) -> list[int]:
    """Return 1 for every decoder layer with experts and 0 for every dense one, by `moe_layer_freq`.

    Raises AssertionError for a list of the wrong length, RuntimeError for neither a number nor a list, ValueError for
    a number below 1 or other entries than 0 and 1.
    """
    layers = int(model.num_layers)
    if read(model, "num_moe_experts") is None:
        return [0] * layers
    freq = read(model, "moe_layer_freq", 1)
    if isinstance(freq, int):
        if freq < 1:
            raise ValueError(f"moe_layer_freq is {freq}; use at least 1")
        return [int(i % freq == 0) for i in range(layers)]
    if not isinstance(freq, (list, tuple)):
        raise RuntimeError(f"moe_layer_freq is {freq!r}; use a number, or a list of 0 and 1")
    if len(freq) != layers:
        raise AssertionError(f"moe_layer_freq has {len(freq)} entries for {layers} layers")
    if not set(freq) <= {0, 1}:
        raise ValueError(f"moe_layer_freq has entries other than 0 and 1: {sorted(set(freq) - {0, 1})}")
    return list(freq)


def count_layers(model: Any, mtp_num_layers: int | None = None) -> tuple[int, int]:
    """Return (dense layers, MoE layers); multi-token-prediction layers count as further last layers.

    mtp_num_layers: None takes the model's.
    """
    pattern = moe_layer_pattern(model)
    pattern += pattern[-1:] * (mtp_layers(model) if mtp_num_layers is None else mtp_num_layers)
    return pattern.count(0), pattern.count(1)


def has_window(model: Any, layer_number: int) -> bool:
    """Return whether this layer, counted from 1, attends within the sliding window only.

    `window_attn_skip_freq` None: every layer; n: all but every n-th; list: layers with 1; anything else: none.
    Raises ValueError: it is a number below 1.
    """
    skip = read(model, "window_attn_skip_freq")
    if skip is None:
        return True
    if isinstance(skip, int):
        if skip < 1:
            raise ValueError(f"window_attn_skip_freq is {skip}; use at least 1")
        return layer_number % skip != 0
    return isinstance(skip, (list, tuple)) and layer_number <= len(skip) and bool(skip[layer_number - 1])


def window_of(model: Any) -> int | None:
    """Return how many keys a query sees in a windowed layer, itself included; None: no window.

    A pair is (keys before, keys after); a negative entry sets no limit.
    """
    window = read(model, "window_size")
    if window is None or isinstance(window, int):
        return window
    return None if min(window) < 0 else sum(window) + 1


def linear_attention_pattern(model: Any) -> list[int]:
    """Return 1 for every decoder layer with linear attention, by `linear_attention_freq`.

    Raises ValueError: it is not set, below 1, or a list of the wrong length. TypeError: neither a number nor a list.
    """
    freq, layers = read(model, "linear_attention_freq"), int(model.num_layers)
    if freq is None:
        raise ValueError("linear_attention_freq is not set; gated delta net attention needs it")
    if isinstance(freq, int):
        if freq < 1:
            raise ValueError(f"linear_attention_freq is {freq}; use at least 1")
        return [int((i + 1) % freq != 0) for i in range(layers)]
    if not isinstance(freq, (list, tuple)):
        raise TypeError(f"linear_attention_freq is a {type(freq).__name__}; use a number, or a list of 0 and 1")
    if len(freq) != layers:
        raise ValueError(f"linear_attention_freq has {len(freq)} entries for {layers} layers")
    return list(freq)


def with_prediction(pattern: Sequence[int], mtp: int) -> int:
    """Return how many layers a pattern marks, multi-token-prediction layers being of the last layer's kind."""
    return sum(pattern) + (pattern[-1] * mtp if pattern else 0)
