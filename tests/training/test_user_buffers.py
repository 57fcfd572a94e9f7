"""What Transformer Engine is given to make user buffers. It is a stub here: the real one needs GPUs."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.comm_overlap import user_buffers  # noqa: E402
from cloudai_mbridge.training.comm_overlap.user_buffers import layer_settings, start_user_buffers, stop_user_buffers  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402

LAYERS = {"qkv_dgrad": {"method": "bulk", "num_sm": 4}}
MODEL: dict[str, Any] = {
    "tp_comm_overlap": True,
    "tp_comm_overlap_cfg": LAYERS,
    "tp_comm_bootstrap_backend": "nccl",
    "seq_length": 4096,
    "hidden_size": 8192,
    "context_parallel_size": 2,
    "tensor_model_parallel_size": 4,
    "params_dtype": torch.bfloat16,
    "fp8": None,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Return the calls of a stub of Transformer Engine."""
    calls = mock.Mock()
    stub = ModuleType("transformer_engine")
    stub.pytorch = SimpleNamespace(  # type: ignore[attr-defined]
        initialize_ub=calls.initialize_ub,
        destroy_ub=calls.destroy_ub,
        UserBufferQuantizationMode=SimpleNamespace(FP8="fp8", NONE="none"),
    )
    monkeypatch.setitem(sys.modules, "transformer_engine", stub)
    monkeypatch.setattr(user_buffers, "te_is_at_least", lambda version: True)
    return calls


def _model(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**MODEL, **fields})


def _given(engine: mock.Mock, **fields: Any) -> dict[str, Any]:
    start_user_buffers(_model(**fields), 3)
    (call,) = engine.initialize_ub.call_args_list
    assert not call.args
    return dict(call.kwargs)


def test_arguments(engine: mock.Mock) -> None:
    assert _given(engine) == {
        "shape": [4096 * 3 // 2, 8192],
        "tp_size": 4,
        "dtype": torch.bfloat16,
        "quantization_modes": ["none"],
        "ub_cfgs": LAYERS,
        "bootstrap_backend": "nccl",
    }


@pytest.mark.parametrize(
    ("fields", "modes"),
    [
        ({"fp8": "hybrid"}, ["fp8"]),
        ({"fp8": "e4m3", "first_last_layers_bf16": True}, ["fp8", "none"]),
        ({"fp8": "e4m3", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}, ["fp8", "none"]),
        (
            {"fp8": "e4m3", "first_last_layers_bf16": True}
            | {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0},
            ["fp8"],
        ),
        ({"first_last_layers_bf16": True}, ["none"]),
    ],
)
def test_buffers_of_each_number_format(engine: mock.Mock, fields: dict[str, Any], modes: list[str]) -> None:
    assert _given(engine, **fields)["quantization_modes"] == modes


def test_releases_before_2_8(engine: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_buffers, "te_is_at_least", lambda version: False)
    given = _given(engine, fp8="hybrid", tp_comm_overlap_cfg=None)
    assert (given["use_fp8"], given["ub_cfgs"], "quantization_modes" in given) == (True, {}, False)


def test_buffers_of_an_earlier_run_go_first(engine: mock.Mock) -> None:
    start_user_buffers(_model(), 1)
    stop_user_buffers(_model())
    assert [call[0] for call in engine.method_calls] == ["destroy_ub", "initialize_ub", "destroy_ub"]


def test_nothing_without_overlap(engine: mock.Mock) -> None:
    start_user_buffers(_model(tp_comm_overlap=False), 1)
    stop_user_buffers(_model(tp_comm_overlap=False))
    assert not engine.method_calls


def test_settings_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    path.write_text("qkv_dgrad: {method: bulk, num_sm: 4}\n")
    assert layer_settings(str(path)) == LAYERS
    for text, words in (("[1]\n", "no table of layers"), ("{", "expected the node content")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            layer_settings(str(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"tp_comm_overlap_cfg = .*No such file"):
        layer_settings(str(tmp_path / "none.yaml"))
