"""The training process reads its config strictly: what it does not understand it does not ignore."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.config import ConfigError, config_from_dict, load_config

GOOD: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "seq_length": 4,
    },
    "train": {"train_iters": 3, "micro_batch_size": 1, "global_batch_size": 2},
    "optimizer": {"lr": 0.001},
}
_REMOVE = object()


def _changed(key: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    *tables, last = key.split(".")
    target = data
    for table in tables:
        target = target.setdefault(table, {})
    if value is _REMOVE:
        del target[last]
    else:
        target[last] = value
    return data


def test_defaults_fill_in_what_is_absent() -> None:
    config = config_from_dict(GOOD)
    assert (config.model.num_layers, config.train.train_iters, config.optimizer.lr) == (2, 3, 0.001)
    assert config.model.dtype == "bf16"
    assert config.scheduler.lr_warmup_iters == 0
    assert config.rng.seed == 1234


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.kv_channels", None),
        ("model.kv_channels", 4),
        ("model.moe_layer_freq", 2),
        ("model.moe_layer_freq", [0, 1]),
        ("model.recompute_modules", ["core_attn"]),
        ("model.dtype", "fp32"),
        ("optimizer.lr", 1),
        ("scheduler.lr_decay_iters", None),
        ("dist.distributed_backend", "gloo"),
        ("ddp.overlap_grad_reduce", True),
    ],
)
def test_legal_values(key: str, value: Any) -> None:
    section, field = key.split(".")
    assert getattr(getattr(config_from_dict(_changed(key, value)), section), field) == value


def test_a_whole_number_becomes_a_float_where_one_is_meant() -> None:
    assert type(config_from_dict(_changed("optimizer.lr", 1)).optimizer.lr) is float


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.num_layer", 2, "model.num_layer: unknown key; did you mean 'num_layers'?"),
        ("modle", {}, "modle: unknown key; did you mean 'model'?"),
        ("zzz", {}, "zzz: unknown key; valid keys: model, train, optimizer"),
        ("model.num_layers", _REMOVE, "model.num_layers: missing"),
        ("train", _REMOVE, "train: missing"),
        ("model.num_layers", "2", "model.num_layers: '2' is not of type int"),
        ("model.num_layers", 2.0, "model.num_layers: 2.0 is not of type int"),
        ("model.num_layers", True, "model.num_layers: True is not of type int"),
        ("model.num_layers", None, "model.num_layers: None is not of type int"),
        ("model.qk_layernorm", 1, "model.qk_layernorm: 1 is not of type bool"),
        ("model.qk_layernorm", "true", "model.qk_layernorm: 'true' is not of type bool"),
        ("optimizer.lr", "0.1", "optimizer.lr: '0.1' is not of type float"),
        ("optimizer.lr", True, "optimizer.lr: True is not of type float"),
        ("optimizer.lr", None, "optimizer.lr: None is not of type float"),
        ("model.dtype", "fp8", "model.dtype: 'fp8' is not one of 'fp32', 'bf16'"),
        ("model.dtype", ["fp32"], "model.dtype: ['fp32'] is not one of"),
        ("model.moe_layer_freq", [0, "1"], "model.moe_layer_freq: [0, '1'] is not"),
        ("model.moe_layer_freq", 1.0, "model.moe_layer_freq: 1.0 is not"),
        ("model.kv_channels", "4", "model.kv_channels: '4' is not"),
        ("model.recompute_modules", "core_attn", "model.recompute_modules: 'core_attn' is not"),
        ("model", [], "model: a table is needed, got []"),
        ("model", None, "model: a table is needed, got None"),
    ],
)
def test_what_is_wrong_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(_changed(key, value))
    assert expected in str(caught.value)


@pytest.mark.parametrize("data", [[], "x", None, 1])
def test_a_config_is_a_table(data: Any) -> None:
    with pytest.raises(ConfigError, match="config: a table is needed"):
        config_from_dict(data)


def test_a_config_is_frozen() -> None:
    config = config_from_dict(GOOD)
    with pytest.raises(AttributeError):
        config.train.train_iters = 5  # type: ignore[misc]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    path.write_text(json.dumps(GOOD))
    assert load_config(path) == config_from_dict(GOOD)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"model": {}} x'])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "training.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"training\.json: "):
        load_config(path)


def test_a_wrong_key_in_a_file_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    path.write_text(json.dumps(_changed("train.iters", 1)))
    with pytest.raises(ConfigError, match=r"training\.json: train\.iters: unknown key"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json"):
        load_config(tmp_path / "gone.json")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, literal: str) -> None:
    """JSON has no such number, and no learning rate is one."""
    path = tmp_path / "training.json"
    path.write_text(json.dumps(GOOD).replace("0.001", literal))
    with pytest.raises(ConfigError, match="is no number"):
        load_config(path)
