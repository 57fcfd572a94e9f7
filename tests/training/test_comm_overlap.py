"""Which communication overlaps, on Megatron-Core's own configs, and the tuned user-buffer presets."""

import copy
import re
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns of every optional package that is not installed
    pytest.importorskip("megatron.core")
    import megatron.core.utils as megatron_utils
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import CudaGraphScope

    from cloudai_mbridge.training import comm_overlap
    from cloudai_mbridge.training.comm_overlap import (
        CommOverlapConfig,
        PipelineOverlapCfg,
        TransformerLayerTPOverlapCfg,
    )
    from cloudai_mbridge.training.comm_overlap.user_buffers import as_te_dict
    from cloudai_mbridge.training.compat import cuda_graphs
    from cloudai_mbridge.training.compat.transformer_engine import have_te

NO_TE = not have_te()
SLOTS = (
    *("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad", "qkv_fprop"),
    *("proj_dgrad", "fc1_fprop", "fc2_dgrad", "proj_fprop", "fc2_fprop"),
)
# Numbers of all are compared with Megatron-Bridge's own: tests/interop/test_names.py
PRESETS = [name for name in comm_overlap.__all__ if name.startswith("userbuffers_")]
# Two of them as Transformer Engine gets them, which together have every kind of settings
_BULK = {"method": "bulk", "cga_size": 2, "set_sm_margin": False}
_PIPELINE = {"method": "pipeline", "cga_size": 2, "num_splits": 4, "set_sm_margin": True, "atomic_gemm": False}
_RING = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "atomic_gemm": False}
_AGGREGATED = {**_RING, "aggregate": True, "fp8_buf": False}
AS_TE = {
    "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192": {
        **{"qkv_dgrad": {**_BULK, "num_sm": 4}, "qkv_wgrad": {**_BULK, "num_sm": 24}},
        **{"fc1_dgrad": {**_BULK, "num_sm": 2}, "fc1_wgrad": {**_BULK, "num_sm": 4}},
        **{
            slot: {**_RING, "aggregate": False, "fp8_buf": False}
            for slot in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")
        },
        "proj_fprop": {**_PIPELINE, "num_sm": 24, "fp8_buf": False},
        "fc2_fprop": {**_PIPELINE, "num_sm": 16, "fp8_buf": False},
    },
    "userbuffers_fp8_h100_h16384_tp4_mbs1_seqlen2048_lora": {
        **{"qkv_dgrad": {**_BULK, "num_sm": 2}, "fc1_dgrad": {**_PIPELINE, "num_sm": 16, "fp8_buf": True}},
        **dict.fromkeys(("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad"), _AGGREGATED),
        "proj_fprop": {**_PIPELINE, "num_sm": 32, "fp8_buf": True},
        "fc2_fprop": {**_PIPELINE, "num_sm": 16, "fp8_buf": True},
    },
}
# The settings that `initialize_ub` of Transformer Engine 2.x knows
TE_SETTINGS = {
    *("method", "is_reduce_scatter", "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate"),
    *("atomic_gemm", "use_ce", "fp8_buf", "comm_priority", "gemm_priority", "pipeline_rs_overlap_first_gemm"),
}


def _model(**changes: Any) -> Any:
    """Return a model config that Megatron-Core accepted, then changed: the rules here have to hold by themselves."""
    model = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=4, **{cuda_graphs.FIELD: []})
    for name, value in changes.items():
        assert hasattr(model, name), name
        setattr(model, name, value)
    return model


def _ddp(**changes: Any) -> Any:
    return DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **changes})


def _setup(model: Any, ddp: Any = None, dp: int = 1, **settings: Any) -> tuple[Any, Any, Any]:
    optimizer, ddp = OptimizerConfig(), ddp or _ddp()
    config = CommOverlapConfig(**{"tp_comm_overlap": False, "data_parallel_size": dp, **settings})
    config.finalize()
    config.setup(model, optimizer, ddp)
    return model, optimizer, ddp


@pytest.fixture
def fake_te(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a FAKE Transformer Engine of a version importable. It has a version and nothing else."""

    def install(version: str) -> None:
        module = types.ModuleType("transformer_engine")
        module.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformer_engine", module)
        monkeypatch.setattr(megatron_utils, "_te_version", None)  # what Megatron-Core remembers

    return install


# Presets and kinds


@every("name", AS_TE)
def test_transformer_engine_gets_the_slots_that_are_set(name: str) -> None:
    assert as_te_dict(getattr(comm_overlap, name)) == AS_TE[name]


@every("name", PRESETS)
def test_transformer_engine_accepts_a_preset(name: str) -> None:
    """The rules that `initialize_ub` checks on a GPU."""
    preset = getattr(comm_overlap, name)
    assert isinstance(preset, TransformerLayerTPOverlapCfg)
    assert sorted(vars(preset)) == sorted(SLOTS)
    layer = as_te_dict(preset)
    for settings in layer.values():
        assert settings.keys() <= TE_SETTINGS
        assert all(type(settings[key]) is bool for key in ("set_sm_margin", "fp8_buf") if key in settings)
    reduce_scatters = {"proj_fprop", "fc2_fprop"}
    for dgrad, wgrad in (("qkv_dgrad", "qkv_wgrad"), ("fc1_dgrad", "fc1_wgrad")):
        if layer[dgrad]["method"] != "bulk":
            reduce_scatters.add(dgrad)
            assert wgrad not in layer
    assert {slot for slot, settings in layer.items() if settings["method"] == "pipeline"} <= reduce_scatters


def test_a_pipeline_has_no_fp8_buffer_by_default() -> None:
    """Megatron-Bridge's default is the tuple (False,), which is true: a BF16 pipeline would get an FP8 buffer."""
    assert PipelineOverlapCfg(num_sm=1, cga_size=2, num_splits=4, set_sm_margin=True).fp8_buf is False


def test_changing_a_config_leaves_the_preset_alone() -> None:
    preset = comm_overlap.userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    before = copy.deepcopy(preset)
    config = CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg=preset)
    assert config.tp_comm_overlap_cfg == preset
    config.tp_comm_overlap_cfg.qkv_dgrad.num_sm = 99  # type: ignore[union-attr]
    config.tp_comm_overlap_cfg = preset
    config.tp_comm_overlap_cfg.qkv_wgrad = None
    assert preset == before


# The config


def test_tp_overlap_has_to_be_given() -> None:
    with pytest.raises(TypeError):
        CommOverlapConfig()  # type: ignore[call-arg]


def test_only_the_first_finalize_looks_at_the_fields() -> None:
    config = CommOverlapConfig(tp_comm_overlap=False, data_parallel_size=2, bucket_size=5)
    config.finalize()
    config.bucket_size = 6
    config.finalize()
    ddp = _ddp()
    config.setup(_model(), OptimizerConfig(), ddp)
    assert ddp.bucket_size == 5


def test_setup_finalizes_and_can_be_repeated() -> None:
    config = CommOverlapConfig(tp_comm_overlap=True, data_parallel_size=2)
    written = copy.deepcopy({field.name: getattr(config, field.name) for field in fields(config)})
    model, optimizer, ddp = _model(), OptimizerConfig(), _ddp()
    config.setup(model, optimizer, ddp)
    first = [dict(vars(target)) for target in (model, optimizer, ddp)]
    config.setup(model, optimizer, ddp)
    assert [vars(target) for target in (model, optimizer, ddp)] == first
    assert {field.name: getattr(config, field.name) for field in fields(config)} == written


# Tensor parallelism


@pytest.mark.skipif(not NO_TE, reason="Transformer Engine is installed")
def test_tp_overlap_is_off_without_transformer_engine(caplog: pytest.LogCaptureFixture) -> None:
    preset = comm_overlap.userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192
    model = _model(tensor_model_parallel_size=2, sequence_parallel=True)
    model.tp_comm_overlap_cfg = "there before"
    _setup(model, tp_comm_overlap=True, tp_comm_overlap_cfg=preset)
    assert (model.tp_comm_overlap, model.tp_comm_overlap_cfg) == (False, None)
    assert "overlap is turned off: Transformer Engine is not installed" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensor_model_parallel_size": 1}, "tensor_model_parallel_size is 1; it takes 2 or more"),
        ({"sequence_parallel": False}, "sequence_parallel is off"),
    ],
)
def test_tp_overlap_is_off_where_it_cannot_work(
    changes: dict[str, Any], why: str, fake_te: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_te("2.9.0")
    model = _model(**{"tensor_model_parallel_size": 2, "sequence_parallel": True, **changes})
    _setup(model, tp_comm_overlap=True)
    assert model.tp_comm_overlap is False
    assert not hasattr(model, "tp_comm_overlap_cfg")
    assert caplog.messages == [f"tensor-parallel communication overlap is turned off: {why}"]


@pytest.mark.parametrize("name", ["bf16_h100_h8192_tp4_mbs1_seqlen8192", "fp8_h100_h16384_tp4_mbs1_seqlen2048_lora"])
def test_tp_overlap_with_a_fake_transformer_engine(
    name: str, fake_te: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_te("2.9.0")
    preset = getattr(comm_overlap, f"userbuffers_{name}")
    model = _model(tensor_model_parallel_size=2, sequence_parallel=True)
    _setup(model, tp_comm_overlap=True, tp_comm_overlap_cfg=preset, tp_comm_bootstrap_backend="gloo")
    assert (model.tp_comm_overlap, model.tp_comm_bootstrap_backend) == (True, "gloo")
    assert model.tp_comm_overlap_cfg == as_te_dict(preset)
    assert all(type(settings) is dict for settings in model.tp_comm_overlap_cfg.values())
    assert not caplog.records


def test_tp_overlap_without_a_layer_config_is_transformer_engines(
    fake_te: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_te("2.9.0")
    model = _model(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_bootstrap_backend="mpi")
    _setup(model, tp_comm_overlap=True, tp_comm_bootstrap_backend=None)
    assert (model.tp_comm_overlap, model.tp_comm_overlap_cfg, model.tp_comm_bootstrap_backend) == (True, None, "mpi")
    assert "no tp_comm_overlap_cfg" in caplog.text


def test_tp_overlap_not_asked_for_is_off_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(tp_comm_overlap=True)
    _setup(model, tp_comm_overlap=False)
    assert model.tp_comm_overlap is False
    assert not caplog.records


# Pipeline parallelism


@every(
    ("pp", "vp", "overlap", "batch"),
    [
        (1, None, False, False),
        (1, 2, False, False),
        (2, None, False, True),
        (2, 1, False, True),
        (2, 2, True, False),
        (4, 3, True, False),
    ],
)
def test_pipeline_overlap(pp: int, vp: int | None, overlap: bool, batch: bool) -> None:
    model = _model(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp)
    _setup(model)
    assert (model.overlap_p2p_comm, model.batch_p2p_comm) == (overlap, batch)
    assert (model.defer_embedding_wgrad_compute, model.wgrad_deferral_limit) == (False, -1)
    assert (model.overlap_moe_expert_parallel_comm, model.delay_wgrad_compute) == (False, False)


# Data parallelism


@every(
    ("dp", "pp", "vp", "align"),
    [(2, 1, None, False), (2, 2, None, False), (2, 2, 1, False), (2, 1, 2, False), (2, 2, 2, True)],
)
def test_data_parallel_overlap(dp: int, pp: int, vp: int | None, align: bool) -> None:
    model = _model(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp)
    _, optimizer, ddp = _setup(model, dp=dp)
    assert (ddp.bucket_size, ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (134217728, True, True)
    assert ddp.align_param_gather is align
    assert (optimizer.overlap_param_gather, optimizer.overlap_param_gather_with_optimizer_step) == (True, False)


def test_one_replica_has_nothing_to_overlap() -> None:
    model = _model(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    there_before = _ddp(bucket_size=1, overlap_grad_reduce=True, overlap_param_gather=True, align_param_gather=True)
    _, optimizer, ddp = _setup(model, there_before, dp=1)
    assert (ddp.bucket_size, ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (None, False, False)
    assert ddp.align_param_gather is False
    assert optimizer.overlap_param_gather is False


@every("dp", [1, 2])
def test_the_users_overlap_wins(dp: int) -> None:
    pipeline = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    pipeline |= {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 22}
    of_ddp = {"bucket_size": 7, "overlap_grad_reduce": False, "align_param_gather": True}
    shared = {"overlap_param_gather": True}
    of_optimizer = {"overlap_param_gather_with_optimizer_step": True}
    model, optimizer, ddp = _setup(
        _model(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        dp=dp,
        **(pipeline | of_ddp | shared | of_optimizer),
    )
    expected = ((model, pipeline), (ddp, of_ddp | shared), (optimizer, of_optimizer | shared))
    for config, settings in expected:
        assert {name: getattr(config, name) for name in settings} == settings


def test_without_a_distributed_optimizer_the_data_parallel_part_stays() -> None:
    _, optimizer, ddp = _setup(_model(), _ddp(use_distributed_optimizer=False, bucket_size=3), dp=8, bucket_size=7)
    assert ddp == DistributedDataParallelConfig(bucket_size=3)
    assert optimizer == OptimizerConfig()


def test_another_ddp_stays_as_it_is() -> None:
    other = types.SimpleNamespace(use_distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=3)
    CommOverlapConfig(tp_comm_overlap=False).setup(_model(), OptimizerConfig(), other)
    assert vars(other) == {"use_distributed_optimizer": True, "overlap_grad_reduce": False, "bucket_size": 3}


def test_the_data_parallel_size_has_to_be_known(sentence: Sentence) -> None:
    with pytest.raises(ValueError, match="data_parallel_size") as caught:
        CommOverlapConfig(tp_comm_overlap=False).setup(_model(), OptimizerConfig(), _ddp())
    sentence(caught)


# Expert parallelism

EXPERTS: dict[str, Any] = {
    "bf16": True,
    "expert_model_parallel_size": 2,
    "num_moe_experts": 2,
    "moe_token_dispatcher_type": "alltoall",
}
_EP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True}


@every(
    ("changes", "message"),
    [
        ({}, ""),
        ({"moe_token_dispatcher_type": "flex"}, ""),
        ({"bf16": False, "fp16": True}, ""),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}, ""),
        ({"recompute_granularity": "selective"}, ""),
        ({"mtp_num_layers": 1}, ""),
        ({"expert_model_parallel_size": 1}, "expert_model_parallel_size > 1, not 1"),
        ({"num_moe_experts": 1}, "num_moe_experts > 1, not 1"),
        ({"num_moe_experts": None}, "num_moe_experts > 1, not None"),
        ({"moe_token_dispatcher_type": "allgather"}, "moe_token_dispatcher_type"),
        ({"bf16": False}, "bf16 or fp16"),
        ({"pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size with"),
        ({"recompute_granularity": "full"}, "recompute_granularity other than"),
        ({"recompute_method": "uniform"}, "recompute_method None"),
        ({"recompute_num_layers": 1}, "recompute_num_layers None, not 1"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap off"),
        ({"mtp_num_layers": 2}, "mtp_num_layers None, 0 or 1, not 2"),
    ],
)
def test_expert_overlap_is_legal_or_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    model, ddp = _model(**(EXPERTS | changes)), _ddp()
    before = dict(vars(model))
    if not message:
        _setup(model, ddp, **_EP)
        assert model.overlap_moe_expert_parallel_comm is True
        return
    with pytest.raises(AssertionError, match=re.escape(f"overlap_moe_expert_parallel_comm requires {message}")):
        _setup(model, ddp, dp=2, **_EP)
    assert vars(model) == before
    assert ddp == _ddp()


def test_expert_overlap_hangs_in_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from packaging.version import Version

    monkeypatch.setattr(megatron_utils, "_torch_version", Version("2.6.0"))
    _setup(_model(**EXPERTS), **_EP)
    monkeypatch.setattr(megatron_utils, "_torch_version", Version("2.5.1"))
    with pytest.raises(AssertionError, match=r"requires torch >= 2\.6\.0"):
        _setup(_model(**EXPERTS), **_EP)


def test_a_model_has_to_know_expert_overlap(sentence: Sentence) -> None:
    model = types.SimpleNamespace(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None)
    with pytest.raises(AssertionError) as caught:
        CommOverlapConfig(tp_comm_overlap=False).setup(model, None, None)
    sentence(caught)


def test_the_models_own_flag_is_turned_off_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(**EXPERTS, overlap_moe_expert_parallel_comm=True)
    _setup(model)
    assert model.overlap_moe_expert_parallel_comm is False
    assert "set comm_overlap.overlap_moe_expert_parallel_comm to have it" in caplog.text


# Delayed weight gradients

_DELAY: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


def test_delayed_wgrad_reaches_model_and_ddp() -> None:
    for ddp in (_ddp(), _ddp(use_distributed_optimizer=False)):
        model, _, _ = _setup(_model(**EXPERTS), ddp, **_DELAY)
        assert model.delay_wgrad_compute is True
        assert ddp.delay_wgrad_compute is True


@pytest.mark.parametrize("flag_of_the_model", [False, True])
def test_delayed_wgrad_requires_expert_overlap(flag_of_the_model: bool) -> None:
    """The model's own flag does not count: this section turns it off."""
    model = _model(**EXPERTS, overlap_moe_expert_parallel_comm=flag_of_the_model)
    with pytest.raises(AssertionError, match="delay_wgrad_compute requires overlap_moe_expert_parallel_comm"):
        _setup(model, delay_wgrad_compute=True)


@pytest.mark.skipif(not NO_TE, reason="Transformer Engine is installed")
@every(
    ("setup", "what"),
    [
        ({"dp": 2}, "overlap_grad_reduce"),  # which two replicas turn on
        ({"overlap_grad_reduce": True}, "overlap_grad_reduce"),
        ({"ddp": {"use_distributed_optimizer": False, "overlap_grad_reduce": True}}, "overlap_grad_reduce"),
        ({"model": {"gradient_accumulation_fusion": True}}, "gradient_accumulation_fusion"),
    ],
)
def test_delayed_wgrad_without_transformer_engine(sentence: Sentence, setup: dict[str, Any], what: str) -> None:
    model = _model(**EXPERTS, **setup.pop("model", {}))
    ddp = _ddp(**setup.pop("ddp", {}))
    with pytest.raises(AssertionError, match=what) as caught:
        _setup(model, ddp, **setup, **_DELAY)
    sentence(caught)


def test_delayed_wgrad_with_a_fake_transformer_engine(fake_te: Callable[[str], None], sentence: Sentence) -> None:
    fake_te("2.7.0")
    model = _model(**EXPERTS, gradient_accumulation_fusion=True)
    _setup(model, dp=2, **_DELAY)
    assert model.delay_wgrad_compute is True
    fake_te("2.6.0")
    with pytest.raises(AssertionError, match=r"2\.7\.0") as caught:
        _setup(model, dp=2, **_DELAY)
    sentence(caught)


GRAPHED: dict[str, Any] = {
    **EXPERTS,
    "gradient_accumulation_fusion": True,
    "add_bias_linear": False,
    "cuda_graph_scope": [CudaGraphScope.attn],
}
_SHARED = {"cuda_graph_scope": [CudaGraphScope.moe_router], "moe_shared_expert_intermediate_size": 8}


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("2.12.0", {}, None),
        ("2.11.0", {}, "Transformer Engine >= 2.12.0 inside a CUDA graph; 2.11.0 is installed"),
        ("2.12.0", {"gradient_accumulation_fusion": False}, "gradient_accumulation_fusion inside a CUDA graph"),
        ("2.12.0", {"add_bias_linear": True}, "add_bias_linear off with attention"),
        ("2.12.0", {"add_qkv_bias": True}, "add_qkv_bias off with attention"),
        ("2.7.0", {"cuda_graph_scope": []}, None),
        ("2.7.0", {"cuda_graph_scope": [CudaGraphScope.mlp]}, None),
        ("2.7.0", {"cuda_graph_scope": [CudaGraphScope.moe_router]}, None),
        ("2.7.0", _SHARED, "Transformer Engine >= 2.12.0"),
        ("2.12.0", _SHARED | {"add_bias_linear": True}, None),
        ("2.7.0", {"cuda_graph_scope": "attn"}, "Transformer Engine >= 2.12.0"),
        ("2.7.0", {"cuda_graph_scope": "mlp,attn"}, "Transformer Engine >= 2.12.0"),
    ],
)
def test_delayed_wgrad_in_a_cuda_graph(
    version: str, changes: dict[str, Any], message: str | None, fake_te: Callable[[str], None]
) -> None:
    fake_te(version)
    model = _model(**(GRAPHED | changes))
    if message is None:
        _setup(model, **_DELAY)
        assert model.delay_wgrad_compute is True
    else:
        with pytest.raises(AssertionError, match=re.escape(f"delay_wgrad_compute requires {message}")):
            _setup(model, **_DELAY)


@every(
    ("scope", "names"),
    [
        (None, set()),
        ([], set()),
        ("attn", {"attn"}),
        ("attn, moe_router", {"attn", "moe_router"}),
        ("CudaGraphScope.attn", {"attn"}),
        (CudaGraphScope.attn, {"attn"}),
        ([CudaGraphScope.attn, "moe"], {"attn", "moe"}),
    ],
)
def test_names_of_graph_scopes(scope: Any, names: set[str]) -> None:
    assert cuda_graphs.names_in(scope) == names
