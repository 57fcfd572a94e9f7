"""Which parameters depart from the optimizer's settings, as Megatron-Core sees the answer."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cases import every

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from megatron.core.optimizer import ParamKey, _get_param_groups

    from cloudai_mbridge.training.config.optimizer import (
        OptimizerConfig,
        OptimizerConfigOverrideProvider,
        OptimizerConfigOverrideProviderContext,
    )
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig


class _Chunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(4, 2)
        self.linear = torch.nn.Linear(2, 2)
        self.q_layernorm = torch.nn.LayerNorm(2)
        self.k_layernorm = torch.nn.RMSNorm(2)
        self.final_layernorm = torch.nn.RMSNorm(2)


QK = {"q_layernorm.weight", "k_layernorm.weight"}
BIASES = {"linear.bias", "q_layernorm.bias"}


def _build(model: Any, scheduler: dict[str, Any] | None = None, **optimizer: Any) -> Any:
    context = OptimizerConfigOverrideProviderContext(
        scheduler_config=SchedulerConfig(**scheduler or {}), optimizer_config=OptimizerConfig(**optimizer), model=model
    )
    return OptimizerConfigOverrideProvider().build_config_overrides(context)


def _matched(overrides: Any, model: torch.nn.Module, override: dict[str, float]) -> set[str]:
    keys = [key for key, value in overrides.items() if value == override]
    return {name for name, parameter in model.named_parameters() if any(key.matches(parameter, name) for key in keys)}


def test_biases_and_vectors_do_not_decay() -> None:
    model = _Chunk()
    overrides = _build(model)
    [(key, override)] = overrides.items()
    assert override == {"wd_mult": 0.0}
    assert set(key.name) == BIASES | QK | {"final_layernorm.weight"}
    assert _matched(overrides, model, {"wd_mult": 0.0}) == set(key.name)


@pytest.mark.parametrize(
    ("scheduler", "optimizer"),
    [({"no_weight_decay_cond_type": "qwen3_next"}, {}), ({}, {"apply_wd_to_qk_layernorm": True})],
)
def test_query_and_key_layernorms_may_decay(scheduler: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Their biases never do."""
    [key] = _build(_Chunk(), scheduler, **optimizer)
    assert set(key.name) == BIASES | {"final_layernorm.weight"}


def test_all_chunks_count() -> None:
    other = torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2)})
    [key] = _build([_Chunk(), other])
    assert {"linear.bias", "proj.bias"} <= set(key.name)


def test_nothing_departs() -> None:
    assert _build(torch.nn.Linear(2, 2, bias=False)) is None
    assert _build([]) is None


@every(
    ("optimizer", "expected"),
    [
        ({"decoupled_lr": 0.5}, {"max_lr": 0.5}),
        ({"decoupled_lr": 0.0}, {"max_lr": 0.0}),
        ({"decoupled_lr": 0.5, "decoupled_min_lr": 0.0}, {"max_lr": 0.5, "min_lr": 0.0}),
    ],
)
def test_embedding_and_output_layer_have_their_own_learning_rate(
    optimizer: dict[str, float], expected: dict[str, float]
) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    overrides = _build(model, **optimizer)
    assert overrides == {ParamKey(attr="is_embedding_or_output_parameter"): expected}
    assert _matched(overrides, model, expected) == set()
    model.weight.is_embedding_or_output_parameter = True  # type: ignore[assignment]
    assert _matched(overrides, model, expected) == {"weight"}


def test_a_minimum_alone_is_no_decoupled_rate() -> None:
    assert _build(torch.nn.Linear(2, 2, bias=False), decoupled_min_lr=0.1) is None


def test_both_kinds_of_override_stand_side_by_side() -> None:
    assert [sorted(value) for value in _build(_Chunk(), decoupled_lr=0.5).values()] == [["wd_mult"], ["max_lr"]]


@pytest.fixture
def _one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_megatron_core_groups_the_parameters_by_them() -> None:
    model = _Chunk()
    model.word_embeddings.weight.is_embedding_or_output_parameter = True  # type: ignore[assignment]
    settings = {"lr": 0.1, "min_lr": 0.01, "decoupled_lr": 0.5}
    overrides = _build(model, {"no_weight_decay_cond_type": "qwen3_next"}, **settings)
    groups = _get_param_groups([model], OptimizerConfig(**settings), overrides)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {(g["wd_mult"], g["max_lr"], g["min_lr"]): {names[id(p)] for p in g["params"]} for g in groups}
    assert seen == {
        (1.0, 0.1, 0.01): {"linear.weight"} | QK,
        (0.0, 0.1, 0.01): BIASES | {"final_layernorm.weight"},
        (1.0, 0.5, 0.01): {"word_embeddings.weight"},
    }
