"""Hooks on a freshly built model: frozen routers and value heads. The chunks are stubs."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

import torch
from cloudai_mbridge.training.utils.train_utils import (
    LinearForLastLayer,
    _ensure_model_list,
    _freeze_parameter_if_present,
    _register_linear_for_last_layer_mapping,
    create_value_head_hook,
    freeze_moe_router,
    make_value_model,
)

from cloudai_mbridge.training.models import hooks


def _parameters(*names: str) -> Any:
    return SimpleNamespace(**{name: torch.nn.Parameter(torch.ones(1)) for name in names}, other=torch.ones(1))


def _moe_layer() -> Any:
    router = _parameters("weight", "bias")
    experts = _parameters("gate_weight", "gate_bias", "weight")
    return SimpleNamespace(mlp=SimpleNamespace(router=router, shared_experts=experts))


def _chunk(*layers: Any) -> Any:
    return SimpleNamespace(decoder=SimpleNamespace(layers=list(layers)))


def test_routers_are_frozen() -> None:
    layer, no_bias = _moe_layer(), _moe_layer()
    no_bias.mlp.router.bias = None
    no_bias.mlp.shared_experts = None
    empty = (SimpleNamespace(), SimpleNamespace(mlp=None), SimpleNamespace(mlp=SimpleNamespace(router=None)))
    chunks: Any = [_chunk(layer, *empty), SimpleNamespace(), SimpleNamespace(decoder=None), _chunk(no_bias)]
    for _ in range(2):
        assert freeze_moe_router(chunks) is chunks
    router, experts = layer.mlp.router, layer.mlp.shared_experts
    assert not any(p.requires_grad for p in (router.weight, router.bias, experts.gate_weight, experts.gate_bias))
    assert not no_bias.mlp.router.weight.requires_grad
    assert experts.weight.requires_grad


def test_one_chunk_is_taken_as_a_list() -> None:
    chunk: Any = _chunk()
    assert freeze_moe_router(chunk) == [chunk]
    chunks: Any = [chunk]
    assert _ensure_model_list(chunks) is chunks
    pair: Any = (chunk, chunk)
    assert _ensure_model_list(pair) == [pair]


def test_a_missing_parameter_is_passed_over() -> None:
    module = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(1)), bias=None)
    for name in ("weight", "bias", "absent"):
        _freeze_parameter_if_present(module, name)
    assert not module.weight.requires_grad


def test_the_value_head() -> None:
    head = LinearForLastLayer(4, 2, False)
    assert (head.in_features, head.out_features, head.bias) == (4, 2, None)
    assert not hasattr(head.weight, "sequence_parallel")
    assert LinearForLastLayer(4, 2, True).weight.sequence_parallel is True
    x = torch.randn(3, 1, 4)
    values, bias = head(x)
    assert bias is None
    assert torch.equal(values, x @ head.weight.t())
    assert torch.equal(head(x, weight=torch.zeros(2, 4), runtime_gather_output=True)[0], values)
    assert head(x.bfloat16())[0].dtype == torch.float32
    assert head.bfloat16()(x.bfloat16())[0].dtype == torch.float32


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's state, made up: (pipeline stages, virtual stages, which virtual stage of this rank is the last)."""

    def be(pp: int, vp: int | None, last: int | None) -> None:
        fake = SimpleNamespace(
            get_pipeline_model_parallel_world_size=lambda: pp,
            get_virtual_pipeline_model_parallel_world_size=lambda: vp,
            is_pipeline_last_stage=lambda ignore_virtual=True, vp_stage=None: (
                last is not None if ignore_virtual else vp_stage == last
            ),
        )
        monkeypatch.setattr(hooks, "mpu", fake)

    return be


def _with_output() -> Any:
    return SimpleNamespace(output_layer=torch.nn.Linear(4, 9))


@pytest.mark.parametrize(
    ("pp", "vp", "last", "expected"),
    [(1, None, 0, [True]), (2, None, None, [False]), (2, 2, 1, [False, True]), (2, 2, None, [False, False])],
)
def test_the_last_stage_gets_the_head(stages: Any, pp: int, vp: int | None, last: int | None, expected: Any) -> None:
    stages(pp, vp, last)
    chunks = [_with_output() for _ in expected]
    assert create_value_head_hook(4, False, output_size=3)(chunks) is chunks
    assert [isinstance(chunk.output_layer, LinearForLastLayer) for chunk in chunks] == expected
    assert [chunk.output_layer.out_features for chunk in chunks] == [3 if is_last else 9 for is_last in expected]


def test_a_value_model_has_one_output(stages: Any) -> None:
    stages(1, None, 0)
    chunk = _with_output()
    assert make_value_model(4, True)(chunk) == [chunk]
    assert (chunk.output_layer.out_features, chunk.output_layer.sequence_parallel) == (1, True)


def test_as_many_chunks_as_virtual_stages(stages: Any, sentence: Sentence) -> None:
    stages(2, 2, 1)
    with pytest.raises(ValueError) as caught:
        make_value_model(4, False)(_with_output())
    sentence(caught)


def test_the_head_is_registered_for_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge is a fake here: it does not run without a GPU. Without it there is nothing to register with."""
    _register_linear_for_last_layer_mapping()
    registered: dict[str, str] = {}
    fake: Any = ModuleType("fake")
    fake.AutoMapping = SimpleNamespace(register_module_type=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "megatron.bridge.models.conversion.param_mapping", fake)
    _register_linear_for_last_layer_mapping()
    _register_linear_for_last_layer_mapping()
    assert registered == {"LinearForLastLayer": "replicated"}
