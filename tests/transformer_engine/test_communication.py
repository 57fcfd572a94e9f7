"""User buffers, exchange of experts, fused operations, recomputation: what is built; by the emulation, the losses."""

import importlib.util
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.transformer_engine.emulated_run import differences, train
from tests.transformer_engine.engine import Built, build, configure, gpu, on_one_rank, torch

# isort: split
from megatron.core.transformer.moe import token_dispatcher
from transformer_engine import pytorch as te

from cloudai_mbridge.training import comm_overlap
from cloudai_mbridge.training.comm_overlap.user_buffers import as_te_dict
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config

PRESET = comm_overlap.userbuffers_fp8_h100_h8192_tp4_mbs1_seqlen8192
TWO_RANKS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
FUSED = {"use_transformer_engine_op_fuser": True}
LIMITED = {
    **FUSED,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "moe_mlp_glu_interleave_size": 16,
}


def _build(model: str, world: int = 1, overlap: dict[str, Any] | None = None, **fields: Any) -> Built:
    config = configure(model, **fields)
    if overlap is not None:
        config.comm_overlap = comm_overlap.CommOverlapConfig(**{"tp_comm_overlap": False, **overlap})
    with gpu():
        return build(config, world=world)


def test_attention_is_split_over_two_levels_of_groups() -> None:
    sizes = {"hierarchical_context_parallel_sizes": [2, 4], "cp_comm_type": "a2a+p2p"}
    built = _build("dense", world=8, context_parallel_size=8, **sizes)
    for layer in built.model.decoder.layers:
        assert [each.size() for each in layer.self_attention.core_attention.cp_group] == [2, 4]


@pytest.fixture
def fused_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for the package deep_ep."""
    find = importlib.util.find_spec
    found: Callable[..., Any] = lambda name, *_: object() if name == "deep_ep" else find(name)  # noqa: E731
    monkeypatch.setattr("cloudai_mbridge.training.startup.unsupported.find_spec", found)
    for name in ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine", "set_deepep_num_sms"):
        monkeypatch.setattr(token_dispatcher, name, lambda *_: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Take the place of `initialize_ub`, which needs GPUs, with its signature."""
    start = mock.create_autospec(te.initialize_ub)
    start.side_effect = lambda **_: setattr(te.module.base, "_ub_initialized", True)  # which layers ask for
    monkeypatch.setattr(te, "initialize_ub", start)
    yield start
    te.destroy_ub()


@pytest.mark.parametrize("recipe", ["bf16_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_user_buffers(recipe: str, started: mock.Mock) -> None:
    config = configure("dense", **TWO_RANKS)
    config.mixed_precision = precision = get_mixed_precision_config(recipe)
    precision.fp8_param = False  # weights in FP8 need a driver
    config.comm_overlap = comm_overlap.CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg=PRESET)
    with gpu():
        built = build(config, world=2)
    kinds = te.UserBufferQuantizationMode
    started.assert_called_once_with(
        shape=[64, 64],
        tp_size=2,
        dtype=torch.bfloat16,
        quantization_modes=[kinds.FP8, kinds.NONE] if "fp8" in recipe else [kinds.NONE],
        ub_cfgs=as_te_dict(PRESET),
        bootstrap_backend="nccl",
    )
    layer = built.model.decoder.layers[0]
    assert (layer.self_attention.linear_qkv.ub_name, layer.mlp.linear_fc2.ub_name) == ("qkv", "fc2")
    assert layer.self_attention.linear_qkv.ub_overlap_ag_fprop
    assert layer.mlp.linear_fc2.ub_overlap_rs_fprop


@pytest.mark.usefixtures("fused_experts")
@pytest.mark.parametrize("model", ["dense", "qk_norm", "grouped"])
def test_fused_operations_change_no_weight(model: str) -> None:
    built, apart = _build(model, **FUSED), on_one_rank(model, with_te=True)
    mlp = built.model.decoder.layers[1].mlp
    assert mlp.experts._with_fused_impl if model == "grouped" else type(mlp).__name__ == "TEFusedMLP"
    for ours, theirs in ((built.weights, apart.weights), (built.checkpoint, apart.checkpoint)):
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_a_dense_layer_of_grouped_products() -> None:
    built = _build("dense", **FUSED, use_grouped_gemm_for_dense_mlp=True)
    assert type(built.model.decoder.layers[1].mlp).__name__ == "TEFusedMLPWithGroupedLinear"
    assert built.weights.keys() == on_one_rank("dense", with_te=True).weights.keys()


@pytest.mark.parametrize(
    ("world", "fields", "words"),
    [
        (1, {}, r"NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 in env_vars;"),
        (4, {**TWO_RANKS, **EP2, "expert_tensor_parallel_size": 2}, r"expert_tensor_parallel_size = 1, not 2, NVTE"),
    ],
)
def test_experts_without_a_fused_form_are_one_line(world: int, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _build("grouped", world, **FUSED, **fields)


@pytest.mark.usefixtures("fused_experts", "backend")
def test_experts_with_a_fixed_number_of_tokens_per_rank() -> None:
    built = _build("grouped", 2, **EP2, **LIMITED)
    dispatcher = built.model.decoder.layers[1].mlp.token_dispatcher
    assert type(dispatcher._comm_manager).__name__ == "_HybridEPManager"
    assert dispatcher._comm_manager.moe_expert_rank_capacity_factor == 1.5
    assert built.config.model.moe_paged_stash


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("backend_name", "manager"), [("deepep", "_DeepepManager"), ("hybridep", "_HybridEPManager")])
def test_dispatchers_with_a_backend(backend_name: str, manager: str) -> None:
    fields = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend_name}
    built = _build("grouped", 2, **EP2, **fields, moe_shared_expert_overlap=False)
    assert type(built.model.decoder.layers[1].mlp.token_dispatcher._comm_manager).__name__ == manager


def test_delayed_weight_gradients() -> None:
    overlap = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    built = _build("grouped", 2, overlap, **EP2)
    layer = built.model.decoder.layers[1]
    delayed = (layer.self_attention.linear_qkv, layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2)
    assert all(product.wgrad_store.delay_wgrad_compute() for product in delayed)
    assert built.config.ddp.delay_wgrad_compute


# Module -> a model that has it, the flag of its second layer
RECOMPUTED = {
    "core_attn": ("dense", "self_attention.checkpoint_core_attention"),
    "layernorm": ("mla", "recompute_input_layernorm"),
    "mlp": ("dense", "recompute_mlp"),
    "mla_up_proj": ("mla", "self_attention.recompute_up_proj"),
    "moe": ("grouped", "mlp.moe_layer_recompute"),
    "moe_act": ("grouped", "mlp.experts.activation_recompute"),
    "shared_experts": ("grouped", "mlp.shared_experts_recompute"),
}


@pytest.mark.parametrize("module", RECOMPUTED)
def test_recomputation_of_a_module(module: str) -> None:
    model, flag = RECOMPUTED[module]
    read = attrgetter(flag)
    built = _build(model, recompute_granularity="selective", recompute_modules=[module])
    assert read(built.model.decoder.layers[1])
    assert not read(on_one_rank(model, with_te=True).model.decoder.layers[1])


# Model, the fields that change no loss: with the same kernels, in another order
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "op_fuser": ("dense", FUSED),
    "interleaved": ("grouped", {"moe_mlp_glu_interleave_size": 16}),
    "expert_capacity": ("grouped", {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 2.0}),
}


@pytest.mark.parametrize("name", SAME)
def test_losses_of_other_ways_to_compute_a_layer(name: str) -> None:
    model, fields = SAME[name]
    plain, other = (train(model, {"dtype": "bf16", **each}).losses for each in ({}, fields))
    assert differences(other, plain) < 1e-3  # of the loss, about 6.2; measured: 8e-5


def test_interleaved_experts_are_saved_in_the_order_of_others(tmp_path: Path) -> None:
    """Their weights are those of any other run, and a resumed run goes on as the uninterrupted one."""
    interleaved, saved = {"dtype": "fp32", "moe_mlp_glu_interleave_size": 16}, str(tmp_path / "saved")
    made = train("grouped", interleaved, {"checkpoint": {"save": saved, "save_interval": 2}})
    begun = {"checkpoint": {"pretrained_checkpoint": saved}}
    one, other = (train("grouped", fields, begun).losses for fields in (interleaved, {"dtype": "fp32"}))
    assert one[0] < made.losses[0]
    assert differences(one, other) < 1e-5
    resumed = train("grouped", interleaved, {"checkpoint": {"load": saved, "ckpt_step": 2}})
    assert resumed.losses == made.losses[2:]
