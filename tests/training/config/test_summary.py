"""The summary's exact text, and what counts as a value that differs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config import (
    _get_key_config_values,
    _get_mcore_transformer_parent,
    _get_non_default_values,
)
from tests.cases import every


@dataclass
class Base:
    """Stands in for a Megatron-Core class."""

    required: int
    same: int = 1
    changed: int = 1
    listed: list[int] = field(default_factory=lambda: [1])
    function: Any = None
    was_function: Any = len
    odd: Any = None
    dtype: torch.dtype = torch.float32
    _private: int = 1


@dataclass
class Derived(Base):
    """Adds a field that the base does not have."""

    own: int = 5


class Incomparable:
    """Refuses to be compared."""

    def __init__(self, error: type[Exception], text: str) -> None:
        self._error, self._text = error, text

    def __ne__(self, other: object) -> bool:
        raise self._error("cannot compare")

    def __repr__(self) -> str:
        return self._text


@dataclass
class Section:
    """A section with something of everything."""

    b: int = 2
    a: str = "x"
    nothing: int | None = None
    function: Any = len
    empty: list[int] = field(default_factory=list)
    _private: int = 1


@every(
    ("values", "expected"),
    [
        ({}, {}),
        ({"changed": 2}, {"changed": (2, 1)}),
        ({"changed": None}, {"changed": (None, 1)}),
        ({"listed": [1]}, {}),
        ({"listed": []}, {"listed": ([], [1])}),
        ({"dtype": torch.bfloat16}, {"dtype": (torch.bfloat16, torch.float32)}),
        ({"own": 6}, {}),
        ({"_private": 2}, {}),
        ({"function": len}, {}),
        ({"was_function": None}, {}),
    ],
)
def test_non_default_values(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _get_non_default_values(Derived(required=9, **values), Base) == expected


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_what_cannot_be_compared_is_compared_as_text(error: type[Exception]) -> None:
    same, other = Incomparable(error, "None"), Incomparable(error, "other")
    assert _get_non_default_values(Derived(required=9, odd=same), Base) == {}
    assert _get_non_default_values(Derived(required=9, odd=other), Base) == {"odd": (other, None)}


def test_a_tensor_has_no_single_truth_value() -> None:
    odd = torch.zeros(2)
    assert _get_non_default_values(Derived(required=9, odd=odd), Base)["odd"][0] is odd


def test_key_values() -> None:
    assert _get_key_config_values(Section()) == {"a": "x", "b": 2, "empty": []}


@every("value", [None, {"a": 1}, 3, "text"])
def test_key_values_of_what_is_no_section(value: Any) -> None:
    assert _get_key_config_values(value) == {}


def test_the_class_that_a_model_is_measured_against(config: Any) -> None:
    layers = dict(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert _get_mcore_transformer_parent(config.model) is TransformerConfig
    assert (
        _get_mcore_transformer_parent(MLATransformerConfig(**layers, **{cuda_graphs.FIELD: []})) is MLATransformerConfig
    )


DOUBLE, SINGLE = "=" * 70, "-" * 70
TEXT = f"""
{DOUBLE}
Configuration Summary (Non-Default Values vs Megatron Core)
{DOUBLE}

[optimizer] Non-default values (vs Mcore OptimizerConfig):
  lr: 0.5  (Mcore default: None)
  optimizer: 'sgd'  (Mcore default: 'adam')

[ddp] Non-default values (vs Mcore DistributedDataParallelConfig):
  bucket_size: 7  (Mcore default: None)

[model] Non-default values (vs Mcore TransformerConfig):
  hidden_size: 32  (Mcore default: 0)
  num_attention_heads: 4  (Mcore default: 0)
  num_layers: 4  (Mcore default: 0)

{SINGLE}
Other Configuration Values:
{SINGLE}

[train]:
  a: 'x'
  b: 2
  empty: []

[tokenizer]:
  a: 'y'
  b: 2
  empty: []

{DOUBLE}
"""


def _summarised(make_config: Callable[..., Any]) -> Any:
    config = make_config(train=Section(), tokenizer=Section(a="y"))
    config.optimizer.lr, config.optimizer.min_lr, config.optimizer.optimizer = 0.5, None, "sgd"
    config.ddp.bucket_size = 7
    setattr(config.model, cuda_graphs.FIELD, "full")
    for name in ("validation", "scheduler", "dataset", "checkpoint", "logger", "rng"):
        setattr(config, name, None)
    return config


def test_the_text(make_config: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    _summarised(make_config).log_non_default_values()
    assert capsys.readouterr().out == TEXT


def test_a_section_at_its_defaults_has_no_header(
    make_config: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = _summarised(make_config)
    config.ddp.bucket_size = None
    config.log_non_default_values()
    assert "[ddp]" not in capsys.readouterr().out


def test_every_section_in_order(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config.tokenizer.vocab_size = 8
    config.log_non_default_values()
    headers = [line.split("]")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    order = "optimizer model train validation scheduler dataset checkpoint logger tokenizer rng"
    assert headers == [f"[{name}" for name in order.split(" ")]


@pytest.mark.parametrize("has_group", [False, True])
def test_other_ranks_are_silent(
    has_group: bool, config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0" if has_group else "1")  # in a process group the group knows the rank
    if has_group:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    config.log_non_default_values()
    assert capsys.readouterr().out == ""


def test_nan_differs_from_itself() -> None:
    assert math.isnan(_get_non_default_values(Derived(required=9, changed=math.nan), Base)["changed"][0])
