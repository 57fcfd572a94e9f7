"""Values shared by the formulas: costs, lengths, fields that a model may lack, kinds of layers, the name of a formula.

Lengths, widths and vocabularies may be numpy arrays; numbers of layers, windows and patterns are plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Training FLOPs per token: in the weights of linear layers, and in the cores, which have no weights.

    Cores belong to attention, recurrences and convolutions.
    """

    linear: Any = 0
    core: Any = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.linear + other.linear, self.core + other.core)

    def __mul__(self, times: Any) -> "Cost":
        return Cost(self.linear * times, self.core * times)

    def __truediv__(self, parts: Any) -> "Cost":
        return Cost(self.linear / parts, self.core / parts)

    @property
    def total(self) -> Any:
        """All FLOPs of a token whose weights are trained; an integer if exact, so that sums stay exact."""
        both = self.linear + self.core
        return int(both) if isinstance(both, float) and both.is_integer() else both

    @property
    def frozen(self) -> Any:
        """All FLOPs with frozen weights: forward and input gradient, no weight gradient (4 instead of 6)."""
        return self.linear * 2 / 3 + self.core


@dataclass(frozen=True)
class Lengths:
    """The sequence lengths of a batch.

    tokens: sum of the lengths (S1). mean: S1 / number of sequences. effective: sum of squares / S1, the length at which
    quadratic work is counted. configured: the model's, which a few terms of the reference use. All equal for full
    sequences.
    """

    tokens: Any
    mean: Any
    effective: Any
    configured: Any

    @classmethod
    def fixed(cls, seq_length: Any) -> "Lengths":
        """Return one sequence of this length."""
        return cls(seq_length, seq_length, seq_length, seq_length)

    @classmethod
    def of_batch(cls, batch_size: int, seq_length: int, total: Any, squared_total: Any) -> "Lengths":
        """Return the lengths of a batch; unknown sums are taken from full sequences. A batch may be empty."""
        is_full = total is None or batch_size <= 0
        tokens = batch_size * seq_length if is_full else total
        mean = seq_length if is_full else _exact(total, batch_size)
        effective = _exact(squared_total, tokens) if squared_total is not None and tokens > 0 else mean
        return cls(tokens, mean, effective, seq_length)


def read(model: Any, name: str, default: Any = None) -> Any:
    """Return a field of a model; the default if the model lacks it or holds None."""
    value = getattr(model, name, None)
    return default if value is None else value


def choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return one of two finite values; element by element for arrays."""
    return condition * if_true + (1 - condition) * if_false


def padded_vocab_size(model: Any) -> Any:
    """Return the vocabulary, rounded up to a multiple of `make_vocab_size_divisible_by` x tensor-parallel ranks.

    The reference's formula rounds up whether or not the model does. Raises ValueError: it has no vocabulary yet.
    """
    if getattr(model, "vocab_size", None) is None:
        raise ValueError("model.vocab_size is not set; set it, or take the tokenizer's")
    multiple = read(model, "make_vocab_size_divisible_by", 128) * read(model, "tensor_model_parallel_size", 1)
    return -(-model.vocab_size // multiple) * multiple


def head_dim(model: Any) -> Any:
    """Return the width of one attention head; Megatron's default if not set."""
    return read(model, "kv_channels") or model.hidden_size // model.num_attention_heads


def query_groups(model: Any) -> Any:
    """Return the number of key/value groups; every head is one by default."""
    return read(model, "num_query_groups", model.num_attention_heads)


def _exact(numerator: Any, denominator: Any) -> Any:
    """Return a quotient, as an integer if it is exact: sums stay exact then."""
    whole, rest = divmod(numerator, denominator)
    return numerator / denominator if rest else whole


class Formula(StrEnum):
    """The formula's name and version, as reports carry it.

    OLD: Megatron-Bridge below 0.5, NeMo containers up to 26.04.01: a gated MLP counts as three projections only if
    the activation is SiLU, and sliding windows are counted as full attention. NEW: gated means three projections,
    windows count; everything else is equal.
    """

    OLD = "megatron-bridge/old"
    NEW = "megatron-bridge/new"

    @classmethod
    def named(cls, text: str) -> "Formula":
        """Return the formula of a full or a short name (`old`, `new`). Raises ValueError: unknown name."""
        for formula in cls:
            if text in (formula.value, formula.value.partition("/")[2]):
                return formula
        raise ValueError(f"unknown FLOPs formula {text!r}; use {', '.join(cls)}, or old, new")


NEW, OLD = Formula.NEW, Formula.OLD
FLOPS_FORMULA = NEW.value  # the training loop's


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
    mtp = int(read(model, "mtp_num_layers", 0)) if mtp_num_layers is None else mtp_num_layers
    pattern += pattern[-1:] * mtp
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
