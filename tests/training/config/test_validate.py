"""Every rule of `validate()`: its last legal and first illegal value, and its effects."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope

from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config import (
    ConfigContainer,
    DatasetBuildContext,
    DatasetProvider,
    FinetuningDatasetConfig,
    NVRxStragglerDetectionConfig,
    PackedSequenceSpecs,
    TensorInspectConfig,
    TrainingConfig,
)
from cloudai_mbridge.training.config.rules import parallel, validate
from cloudai_mbridge.training.config.rules.cuda_graphs import check_graphs
from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
from tests.cases import every
from tests.golden import Sentence


class Device(NamedTuple):
    """The properties of a GPU that the rules read."""

    name: str
    major: int
    minor: int


HOPPER = Device("NVIDIA H200", 9, 0)
AMPERE, ADA, TURING = Device("NVIDIA A100", 8, 0), Device("NVIDIA L40S", 8, 9), Device("Tesla T4", 7, 5)
B200, B300 = Device("NVIDIA B200", 10, 0), Device("NVIDIA B300 SXM6 AC", 10, 3)
GB200, RTX_50 = Device("NVIDIA GB200", 10, 0), Device("NVIDIA GeForce RTX 5090", 12, 0)
HALF_FP32 = ("bf16", "fp16")
Make = Callable[..., Any]


@dataclass
class PackingProvider(DatasetProvider):
    """A dataset of the user's own that packs sequences in the batch; it has no `seq_length`."""

    pack_sequences_in_batch: bool = True
    packed_sequence_specs: PackedSequenceSpecs | None = None

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]:
        """Build nothing."""
        return None, None, None


@dataclass
class PostInitOnly:
    """An adapter with a post-init and no finalize."""

    dim: int = 8
    alpha: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Derive alpha."""
        self.alpha = 2 * self.dim


class Rule(NamedTuple):
    """What a rule raises, and values to set (`section.field`, `env.NAME`, `te` or `gpu`): legal, and others -> message.

    An error of its own stands in front of a message.
    """

    error: type[Exception]
    legal: list[dict[str, Any]]
    illegal: list[tuple[Any, ...]]


def _finetuning(**values: Any) -> FinetuningDatasetConfig:
    return FinetuningDatasetConfig(**{"seq_length": 32, **values})


def _packed(size: int) -> FinetuningDatasetConfig:
    return _finetuning(packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=size))


_SPECS = PackedSequenceSpecs(packed_sequence_size=32)
_TWO = {"train.micro_batch_size": 2, "train.global_batch_size": 8}


def _static(**values: Any) -> FinetuningDatasetConfig:
    specs = PackedSequenceSpecs(packed_sequence_size=32, pad_cu_seqlens=True)
    return _finetuning(packed_sequence_specs=specs, **values)


def _nothing() -> None:
    """Stand in for a finalize that needs what is not installed here."""


# Megatron-Core's own checks of these features need Transformer Engine or more of the model than the rule looks at
_NO_OPTIMIZER_CHECK = {"optimizer.finalize": _nothing}
_NO_MODEL_CHECK = {"model.finalize": _nothing}
_DETERMINISTIC = {"model.deterministic_mode": True, "model.cross_entropy_loss_fusion": False, "env.NCCL_ALGO": "Ring"}
_PRECISION_AWARE = {**_NO_OPTIMIZER_CHECK, "optimizer.use_precision_aware_optimizer": True}
_NO_REUSE = {"mixed_precision": MixedPrecisionConfig(fp8_recipe="mxfp8", fp8_param=True)}
_DELAYED_SCALING = {
    **{**_PRECISION_AWARE, **_NO_MODEL_CHECK, "model.bf16": True, "optimizer.bf16": True},
    **{"model.fp8": "hybrid", "model.fp8_recipe": "delayed", "model.fp8_param": True},
}
_OFFLOADING = {**_NO_MODEL_CHECK, "model.fine_grained_activation_offloading": True}
_FSDP = {"ddp.use_megatron_fsdp": True}
_WHOLE_FP8_WEIGHTS = {
    **{**_NO_MODEL_CHECK, **_FSDP, "ddp.data_parallel_sharding_strategy": "optim_grads", "mixed_precision": None},
    **{"model.fp8": "hybrid", "model.fp8_recipe": "tensorwise", "model.fp8_param": True},
}
_FSDP_SAVE = {**_FSDP, "checkpoint.save": "c"}
_LOCAL_GRAPH = {**_NO_MODEL_CHECK, "model.cuda_graph_impl": "local"}
_DIST_OPTIMIZER = {"optimizer.use_distributed_optimizer": True, "ddp.use_distributed_optimizer": True}
_GATHER_IN_STEP = {"optimizer.overlap_param_gather_with_optimizer_step": True}
_STAGES = {
    "env.WORLD_SIZE": "2",
    **{f"model.{name}_model_parallel_size": 2 for name in ("pipeline", "virtual_pipeline")},
    "model.pipeline_dtype": torch.float32,
}
_NO_GLOO = {"dist.use_gloo_process_groups": False}
_SAMPLES = {"train.train_iters": None, "train.train_samples": 100}
_CP2 = {"env.WORLD_SIZE": "2", "model.context_parallel_size": 2}
_CP4 = {"env.WORLD_SIZE": "4", "model.context_parallel_size": 4, **_NO_MODEL_CHECK}
_CP16 = {"env.WORLD_SIZE": "16", "model.context_parallel_size": 16}
_FINETUNING_CP2 = {**_CP2, "dataset": _finetuning(), "model.calculate_per_token_loss": True}
_DEEPEP = {**_NO_MODEL_CHECK, "model.moe_token_dispatcher_type": "flex", "model.moe_flex_dispatcher_backend": "deepep"}
_HYBRIDEP = {**_DEEPEP, "model.moe_flex_dispatcher_backend": "hybridep"}
_FULL_GRAPH = {
    **_LOCAL_GRAPH,
    "model.cuda_graph_scope": [CudaGraphScope.full_iteration],
    "rerun_state_machine.check_for_nan_in_loss": False,
}
_TE_GRAPH = {**_LOCAL_GRAPH, "model.cuda_graph_impl": "transformer_engine"}
_TE_MLP, _TE_ATTN = ({**_TE_GRAPH, "model.cuda_graph_scope": name} for name in ("mlp", "attn"))
_FULL_GATHER = {
    **_FULL_GRAPH,
    "ddp.overlap_param_gather": True,
    "ddp.overlap_grad_reduce": True,
    "optimizer.overlap_param_gather": True,
    **_DIST_OPTIMIZER,
}
_FIXED = {"pad_to_max_length": True}


def _in_packs(*, padded: bool) -> FinetuningDatasetConfig:
    specs = PackedSequenceSpecs(packed_sequence_size=32, pad_cu_seqlens=padded)
    return _finetuning(packed_sequence_specs=specs, dataset_kwargs=_FIXED)


class _Captured(NamedTuple):
    """A graph, what it can hold, and what it cannot."""

    graph: dict[str, Any]
    fits: dict[str, Any]
    does_not: dict[str, Any]
    message: str


CAPTURED = [
    _Captured(_FULL_GRAPH, {}, {"rerun_state_machine.check_for_spiky_loss": True}, "check_for_spiky_loss"),
    _Captured(_FULL_GRAPH, {}, {"rerun_state_machine.rerun_mode": "validate_results"}, "use 'disabled'"),
    _Captured(_FULL_GRAPH, {}, {"ddp.check_for_nan_in_grad": True}, "ddp.check_for_nan_in_grad"),
    _Captured(_FULL_GRAPH, {"logger.timing_log_level": 0}, {"logger.timing_log_level": 1}, "timing_log_level = 1"),
    _Captured(_FULL_GRAPH, {}, {"train.rampup_batch_size": [2, 2, 8]}, "a batch size that changes"),
    _Captured(_FULL_GATHER, {"model.cuda_graph_warmup_steps": 1}, {"model.cuda_graph_warmup_steps": 0}, "at least 1"),
    _Captured(_FULL_GATHER, {}, {"model.fp16": True, "optimizer.fp16": True}, "fp16 with ddp.overlap_param_gather"),
    _Captured(_TE_MLP, {"model.log_max_attention_logit": True}, _TE_ATTN, "model.log_max_attention_logit"),
    _Captured(_TE_MLP, {"dataset": _in_packs(padded=False)}, _TE_ATTN, "the attention of packed sequences"),
    _Captured(
        _FULL_GRAPH, {"dataset": _in_packs(padded=True)}, {"dataset": _in_packs(padded=False)}, "pad_cu_seqlens to True"
    ),
    _Captured(
        _FULL_GRAPH,
        {"dataset": _finetuning(dataset_kwargs=_FIXED)},
        {"dataset": _finetuning()},
        "pad_to_max_length to True",
    ),
    _Captured(
        _LOCAL_GRAPH,
        {"validation.eval_micro_batch_size": 1},
        {"validation.eval_micro_batch_size": 2},
        "eval_micro_batch_size = 2",
    ),
    _Captured(
        _TE_GRAPH,
        {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "env.NCCL_GRAPH_REGISTER": "0"},
        {"env.NCCL_GRAPH_REGISTER": None},
        "set NCCL_GRAPH_REGISTER=0",
    ),
]

_SAME_WORK = r"micro_batch_size=1, train.global_batch_size=4 \(now 8\), packed_sequence_size=64 \(now 32\)"
_OTHERWISE = {**_DEEPEP, "gpu": TURING}
_ASYNC = {"checkpoint.async_save": True, "checkpoint.save": "c"}
_SIZES = "model.hierarchical_context_parallel_sizes"
RULES = {
    "check_epochs": Rule(
        ValueError,
        [{"dataset": _finetuning(), "train.num_epochs": 2.5, "train.train_iters": None}],
        [({"dataset": PackingProvider(), "train.num_epochs": 2.5}, "num_epochs = 2.5 needs fine-tuning data")],
    ),
    "finalize_sections": Rule(
        AssertionError,
        [{"env.WORLD_SIZE": "4", "model.tensor_model_parallel_size": 4}],
        [
            ({"ddp.reuse_grad_buf_for_mxfp8_param_ag": True}, "Reuse grad buffer only"),
            ({"env.WORLD_SIZE": "6", "model.tensor_model_parallel_size": 4}, r"world size \(6\) is not divisible by 4"),
        ],
    ),
    "apply_deterministic_mode": Rule(
        AssertionError,
        [
            *(
                {**_DETERMINISTIC, "env.NCCL_ALGO": each}
                for each in ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
            ),
            {**_DETERMINISTIC, "model.attention_backend": AttnBackend.fused},
            {"model.attention_backend": AttnBackend.flash},
        ],
        [
            ({**_DETERMINISTIC, "model.attention_backend": AttnBackend.flash}, "flash attention"),
            ({**_DETERMINISTIC, "model.cross_entropy_loss_fusion": True}, "fused cross entropy"),
            *(({**_DETERMINISTIC, "env.NCCL_ALGO": a}, "NCCL_ALGO") for a in ("ring", "Ring,Tree", "NVLS", "", None)),
        ],
    ),
    "_validate_mixed_precision_consistency": Rule(
        AssertionError,
        [
            *({f"model.{half}": True, f"optimizer.{half}": True} for half in HALF_FP32),
            *({**_PRECISION_AWARE, f"model.{half}": True, f"optimizer.{half}": True} for half in HALF_FP32),
            {"model.bf16": True},
            _PRECISION_AWARE,
        ],
        [
            ({**_NO_MODEL_CHECK, "model.bf16": True, "model.fp16": True}, "model: bf16 and fp16 are both True"),
            ({"optimizer.bf16": True, "optimizer.fp16": True}, "optimizer: bf16 and fp16 are both True"),
            *(({**_PRECISION_AWARE, f"model.{half}": True}, f"requires optimizer.{half}=True") for half in HALF_FP32),
            *(({**_PRECISION_AWARE, f"optimizer.{half}": True}, "fp32 model requires") for half in HALF_FP32),
        ],
    ),
    "_validate_fine_grained_activation_offloading": Rule(
        ValueError,
        [_OFFLOADING, {**_OFFLOADING, "te": "2.9.0"}, {**_OFFLOADING, "te": "2.10.0", "env.NVTE_CPU_OFFLOAD_V1": "1"}],
        [
            ({**_OFFLOADING, "model.transformer_impl": "local"}, "got 'local'"),
            ({**_OFFLOADING, "te": "2.10.0", "env.NVTE_CPU_OFFLOAD_V1": None}, "requires NVTE_CPU_OFFLOAD_V1=1"),
            ({**_OFFLOADING, "te": "2.11.0", "env.NVTE_CPU_OFFLOAD_V1": "0"}, "requires NVTE_CPU_OFFLOAD_V1=1"),
        ],
    ),
    "check_graphs": Rule(
        ValueError,
        [
            {**_LOCAL_GRAPH, "model.cuda_graph_scope": "full"},
            {"model.cuda_graph_scope": [CudaGraphScope.full_iteration]},
            _FULL_GRAPH,
            *({**graph, **fits} for graph, fits, _, _ in CAPTURED),
        ],
        [
            *(
                ({**_LOCAL_GRAPH, "model.cuda_graph_scope": scope}, AssertionError, "check_for_nan_in_loss=False")
                for scope in (
                    "full_iteration",
                    "attn,full_iteration",
                    CudaGraphScope.full_iteration,
                    ["full_iteration"],
                    [CudaGraphScope.attn, CudaGraphScope.full_iteration],
                )
            ),
            *(({**graph, **fits, **does_not}, message) for graph, fits, does_not, message in CAPTURED),
        ],
    ),
    "apply_megatron_fsdp": Rule(
        AssertionError,
        [
            {"dist.use_torch_fsdp2": True},
            {"dist.use_megatron_fsdp": True},
            {**_FSDP_SAVE, "checkpoint.ckpt_format": "fsdp_dtensor"},
            _FSDP,
            {"dist.use_tp_pp_dp_mapping": True},
            {**_FSDP, "env.CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        ],
        [
            ({"dist.use_megatron_fsdp": True, "dist.use_torch_fsdp2": True}, ValueError, "exclude each other"),
            *(
                ({f"{each}.use_megatron_fsdp": True, "dist.use_tp_pp_dp_mapping": True}, "use_tp_pp_dp_mapping=False")
                for each in ("ddp", "dist")
            ),
            ({**_FSDP, "env.CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "greater than 1"),
            ({**_FSDP, "ddp.fsdp_manual_registration": True}, "ddp.nccl_ub=True"),
            (
                {
                    **_FSDP,
                    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
                    "train.check_weight_hash_across_dp_replicas_interval": 5,
                },
                "have no replicas",
            ),
            *(
                ({**_FSDP, f"checkpoint.{path}": "c"}, "ckpt_format='fsdp_dtensor', got 'torch_dist'")
                for path in ("save", "load")
            ),
        ],
    ),
    "check_fp8_weights": Rule(
        ValueError,
        [
            {**_NO_REUSE, **_FSDP},
            {"mixed_precision": MixedPrecisionConfig(fp8_recipe="delayed", fp8_param=True)},
            {**_WHOLE_FP8_WEIGHTS, "model.fp8_param": False},
            {**_WHOLE_FP8_WEIGHTS, "model.fp8_recipe": "mxfp8"},
            {**_WHOLE_FP8_WEIGHTS, "ddp.data_parallel_sharding_strategy": "optim_grads_params"},
            {**_WHOLE_FP8_WEIGHTS, "ddp.use_megatron_fsdp": False},
            {**_DELAYED_SCALING, "model.fp8": None},
            {**_DELAYED_SCALING, "model.fp8_recipe": "tensorwise"},
            {**_DELAYED_SCALING, "model.fp8_param": False},
            {**_DELAYED_SCALING, "optimizer.use_precision_aware_optimizer": False},
            {**_DELAYED_SCALING, "optimizer.store_param_remainders": False},
        ],
        [
            (_NO_REUSE, AssertionError, "requires mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=True"),
            (_DELAYED_SCALING, "cannot update FP8 weights with delayed"),
            ({**_WHOLE_FP8_WEIGHTS, "checkpoint.ckpt_format": "fsdp_dtensor"}, "with FP8 weights; use 'optim_"),
        ],
    ),
    "check_modelopt_fusion": Rule(
        AssertionError,
        [
            {"model.restore_modelopt_state": True, "model.gradient_accumulation_fusion": False},
            {"model.gradient_accumulation_fusion": True},
        ],
        [
            (
                {"model.restore_modelopt_state": True, "model.gradient_accumulation_fusion": True},
                "gradient_accumulation_fusion=False",
            )
        ],
    ),
    "check_checkpoint_format": Rule(
        AssertionError,
        [
            {"checkpoint.ckpt_format": "fsdp_dtensor"},
            {**_FSDP_SAVE, "checkpoint.ckpt_format": "fsdp_dtensor"},
            _ASYNC,
            {"checkpoint.ckpt_format": "torch"},
            {**_NO_GLOO, **_DIST_OPTIMIZER},
            {**_NO_GLOO, "checkpoint.ckpt_format": "torch"},
            {**_DIST_OPTIMIZER, "checkpoint.ckpt_format": "torch"},
        ],
        [
            *(
                ({f"checkpoint.{path}": "c", "checkpoint.ckpt_format": "fsdp_dtensor"}, "ddp.use_megatron_fsdp=True")
                for path in ("save", "load")
            ),
            (
                {**_FSDP_SAVE, "checkpoint.ckpt_format": "fsdp_dtensor", "dist.use_torch_fsdp2": True},
                (AssertionError, ValueError),  # alone, or behind apply_megatron_fsdp
                "use_torch_fsdp2",
            ),
            *(({**_ASYNC, "checkpoint.ckpt_format": kind}, f"got '{kind}'") for kind in ("torch", "torch_dcp")),
            ({**_NO_GLOO, **_DIST_OPTIMIZER, "checkpoint.ckpt_format": "torch"}, "got 'torch'"),
        ],
    ),
    "check_decentralized_groups": Rule(
        AssertionError,
        [{**_NO_GLOO, "dist.use_decentralized_pg": True}],
        [
            ({"dist.use_decentralized_pg": True}, "use_gloo_process_groups"),
            ({**_NO_GLOO, "dist.use_decentralized_pg": True, _SIZES: [2, 2]}, NotImplementedError, _SIZES),
        ],
    ),
    "check_gather_with_step": Rule(
        ValueError,
        [{**_GATHER_IN_STEP, **_DIST_OPTIMIZER, **_STAGES}],
        [({**_GATHER_IN_STEP, **others}, "needs virtual pipeline") for others in (_DIST_OPTIMIZER, _STAGES)],
    ),
    "check_training_scheduler_compatibility": Rule(
        AssertionError,
        [
            {"scheduler.lr_decay_iters": 1, "scheduler.lr_warmup_iters": 0},
            {"scheduler.lr_warmup_fraction": 0.5},
            {**_SAMPLES, "scheduler.lr_decay_samples": 9},
            {**_SAMPLES, "scheduler.lr_warmup_samples": 9},
        ],
        [
            ({"scheduler.lr_decay_samples": 40}, "use scheduler.lr_decay_iters, not lr_decay_samples"),
            ({"scheduler.lr_warmup_samples": 1}, "use scheduler.lr_warmup_iters, not lr_warmup_samples"),
            ({"scheduler.lr_warmup_iters": 1, "scheduler.lr_warmup_fraction": 0.1}, "lr_warmup_fraction"),
            ({**_SAMPLES, "scheduler.max_steps": 9}, "max_steps = 9 counts iterations, and train.train_samples is set"),
            ({**_SAMPLES, "scheduler.lr_decay_iters": 9}, "use scheduler.lr_decay_samples, not lr_decay_iters"),
            ({**_SAMPLES, "scheduler.lr_warmup_iters": 1}, "use scheduler.lr_warmup_samples, not lr_warmup_iters"),
            ({**_SAMPLES, "scheduler.lr_warmup_samples": 1, "scheduler.lr_warmup_fraction": 0.1}, "lr_warmup_fraction"),
        ],
    ),
    "calculate_scheduler_steps": Rule(
        ValueError,
        [{"scheduler.lr_decay_iters": 1}],
        [
            ({"train.global_batch_size": None}, "train.global_batch_size"),
            ({"scheduler.lr_decay_iters": 0}, "decays over 0 samples"),
        ],
    ),
    "check_sequence_split": Rule(
        AssertionError,
        [
            _CP2,
            {**_CP4, "model.seq_length": 40, "dataset.seq_length": 40},
            _FINETUNING_CP2,
            {"dataset": _finetuning(), "ddp.average_in_collective": True},
        ],
        [
            ({**_CP4, "model.seq_length": 36, "dataset.seq_length": 36}, r"\(36\)"),
            ({**_FINETUNING_CP2, "model.calculate_per_token_loss": False}, "calculate_per_token_loss=True"),
            ({**_FINETUNING_CP2, "ddp.average_in_collective": True}, "average_in_collective=False"),
        ],
    ),
    "check_cp_comm_type": Rule(
        AssertionError,
        [
            {**_CP2, "model.cp_comm_type": "p2p"},
            {**_CP2, "model.cp_comm_type": ["p2p", "a2a", "p2p", "all_gather"]},
            {"model.cp_comm_type": ["p2p"]},
            {**_CP16, "model.cp_comm_type": "a2a+p2p", _SIZES: [8, 2]},
        ],
        [
            ({"model.cp_comm_type": "a2a+p2p"}, f"requires {_SIZES}"),
            ({**_CP2, **_NO_MODEL_CHECK, "model.cp_comm_type": ["p2p"] * 3}, "has 3 entries, but there are 4 layers"),
            ({**_CP2, **_NO_MODEL_CHECK, "model.cp_comm_type": ("p2p",)}, "got tuple"),
            ({"model.cp_comm_type": ["p2p", "a2a+p2p"]}, f"requires {_SIZES}"),
            (
                {**_CP16, "model.cp_comm_type": "a2a+p2p", _SIZES: [4, 2]},
                r"\[4, 2\] is 8, but context_parallel_size is 16",
            ),
        ],
    ),
    "check_peft_checkpoint": Rule(
        AssertionError,
        [{"peft": PostInitOnly(), "checkpoint.pretrained_checkpoint": "/"}],
        [({"peft": PostInitOnly()}, "checkpoint.pretrained_checkpoint")],
    ),
    "check_data": Rule(
        ValueError,
        [
            {"dataset": _packed(32)},
            {"dataset": _static(dataset_kwargs={"pad_to_max_length": True})},
            {"dataset": PackingProvider(pack_sequences_in_batch=False, packed_sequence_specs=_SPECS)},
            {"dataset": _packed(0), "train.micro_batch_size": 2},
            {"dataset": _finetuning(), "train.micro_batch_size": 2},
            {"dataset": PackingProvider(), "train.micro_batch_size": 2},
            {"dataset": PackingProvider(pack_sequences_in_batch=False)},
            {"model.seq_length": 33, "dataset.seq_length": 33},
            {"model.seq_length": 33, "dataset": _finetuning(seq_length=33)},
            {"model.seq_length": 33, "dataset": PackingProvider(pack_sequences_in_batch=False)},
        ],
        [
            ({"dataset": _packed(32), "train.micro_batch_size": 2, "train.global_batch_size": 8}, _SAME_WORK),
            ({"dataset": PackingProvider()}, "greater than 1"),
            (
                {"dataset": PackingProvider(pack_sequences_in_batch=False, packed_sequence_specs=_SPECS), **_TWO},
                _SAME_WORK,
            ),
            ({"dataset": _static()}, "requires dataset.dataset_kwargs.pad_to_max_length=True"),
            ({"dataset": _static(dataset_kwargs={"pad_to_max_length": False})}, "pad_to_max_length=True"),
            ({"model.seq_length": 64}, AssertionError, r"\(64\) must equal dataset.seq_length \(32"),
            ({"dataset": _finetuning(seq_length=33)}, AssertionError, r"seq_length \(33\)"),
        ],
    ),
    "check_flex_dispatcher": Rule(
        ValueError,
        [
            *({**_DEEPEP, "gpu": gpu} for gpu in (AMPERE, ADA, HOPPER, B200, B300, None)),
            *({**_HYBRIDEP, "gpu": gpu} for gpu in (AMPERE, HOPPER, B200, GB200, None)),
            *({**_OTHERWISE, "model.moe_token_dispatcher_type": each} for each in ("alltoall", "allgather")),
            {"gpu": TURING},
        ],
        [
            *(
                ({**_DEEPEP, "gpu": gpu}, f"'deepep' runs on .* this one is {gpu.name}")
                for gpu in (TURING, GB200, RTX_50)
            ),
            *(({**_HYBRIDEP, "gpu": gpu}, "'hybridep' runs on") for gpu in (TURING, RTX_50)),
        ],
    ),
}


def _set(config: Any, values: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    for key, value in sorted(values.items(), key=lambda item: "." in item[0]):  # whole sections first
        section, _, name = key.partition(".")
        if key == "gpu":
            patch.setattr(parallel, "current_gpu", lambda device=value: device)
        elif key == "te":
            patch.setattr(validate, "te_is_at_least", lambda minimum, version=value: _parts(version) >= _parts(minimum))
        elif section == "env":
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        elif name:
            setattr(getattr(config, section), name, value)
        else:
            setattr(config, section, copy.deepcopy(value))


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@every(("name", "values"), [(name, values) for name, rule in RULES.items() for values in rule.legal])
def test_the_last_legal_value(
    name: str, values: dict[str, Any], make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    _set(config, values, monkeypatch)
    config.validate()


@every(("name", "case"), [(name, case) for name, rule in RULES.items() for case in rule.illegal])
def test_the_first_illegal_value(
    name: str, case: tuple[Any, ...], make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, *own, message = case
    rule = next(rule for rule in validate.CHECKS if rule.__name__ == name)
    for check in (rule, ConfigContainer.validate):
        config = make_config()
        _set(config, values, monkeypatch)
        with pytest.raises(own[0] if own else RULES[name].error, match=message):
            check(config)


EFFECTS = [
    ({"dataset": PackingProvider(), "train.micro_batch_size": 2}, {"_pack_sequences_in_batch": True}),
    ({"rng.te_rng_tracker": True}, {"use_te_rng_tracker": True}),
    ({f"model.{cuda_graphs.FIELD}": "attn"}, {cuda_graphs.FIELD: []}),
    ({"dist.lazy_mpu_init": True}, {"use_cpu_initialization": True}),
    ({"model.use_cpu_initialization": True}, {"use_cpu_initialization": True}),
    ({}, {"use_cpu_initialization": False, "use_te_rng_tracker": False}),
]


@every(("values", "expected"), EFFECTS)
def test_effects_on_the_model(
    values: dict[str, Any], expected: dict[str, Any], make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    _set(config, values, monkeypatch)
    config.validate()
    assert {name: getattr(config.model, name) for name in expected} == expected


def test_packing_is_known_before_the_model_is_finalized(config: Any) -> None:
    seen: list[bool] = []
    config.dataset, config.train.micro_batch_size = PackingProvider(), 2
    config.model.finalize = lambda: seen.append(config.model._pack_sequences_in_batch)
    config.validate()
    assert seen == [True]


def test_packing_that_is_turned_off_again_is_off_in_the_model(config: Any, make_config: Make) -> None:
    """Megatron-Bridge leaves the model's mark as it was."""
    config.dataset, config.train.micro_batch_size = PackingProvider(), 2
    config.validate()
    config.dataset.pack_sequences_in_batch = False
    config.validate()
    assert config.model._pack_sequences_in_batch is False
    other = make_config()
    other.validate()
    assert not hasattr(other.model, "_pack_sequences_in_batch")


def test_every_section_is_finalized_once_and_in_order(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.tensor_inspect, config.nvrx_straggler = TensorInspectConfig(), NVRxStragglerDetectionConfig()
    order = [*("dataset", "ddp", "optimizer", "model", "logger", "train", "scheduler", "checkpoint")]
    order += ["profiling", "nvrx_straggler", "tensor_inspect"]
    called: list[str] = []
    for name in order:
        monkeypatch.setattr(getattr(config, name), "finalize", lambda name=name: called.append(name), raising=False)
    config.validate()
    assert called == order


@pytest.mark.parametrize("name", ["profiling", "nvrx_straggler", "tensor_inspect"])
def test_sections_that_may_be_absent(name: str, config: Any) -> None:
    setattr(config, name, None)
    config.validate()


def test_a_section_without_finalize_has_its_post_init_repeated(config: Any) -> None:
    config.peft, config.checkpoint.pretrained_checkpoint = PostInitOnly(), "/"
    config.peft.dim = 16
    config.validate()
    assert config.peft.alpha == 32


def test_a_section_with_finalize_has_no_post_init_repeated(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config.model), "__post_init__", lambda self: pytest.fail("called"))
    config.model.finalize = _nothing
    validate.finalize_sections(config)


def test_the_te_tracker_of_the_model_reaches_the_rng_section(config: Any) -> None:
    config.model.use_te_rng_tracker = True
    validate.sync_te_rng_tracker(config)
    assert config.rng.te_rng_tracker is True


@every(
    ("world_size", "layout", "expected"),
    [
        (1, (1, 1, 1), 1),
        (8, (2, 1, 2), 2),
        (12, (2, 3, 2), 1),
        (24, (2, 3, 2), 2),
        (3, (2, 1, 1), None),
        (3, (1, 2, 1), None),
        (3, (1, 1, 2), None),
        (18, (2, 3, 2), None),
    ],
)
def test_data_parallel_size(config: Any, world_size: int, layout: tuple[int, int, int], expected: int | None) -> None:
    model = config.model
    model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size = layout
    if expected is not None:
        assert config.get_data_parallel_size(world_size) == expected
        return
    with pytest.raises(AssertionError, match=rf"world size \({world_size}\) is not divisible by"):
        config.get_data_parallel_size(world_size)


def test_the_world_size_is_the_process_groups_before_the_environments(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config.set_data_parallel_size()
    assert config.data_parallel_size == 4
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    config.set_data_parallel_size()
    assert config.data_parallel_size == 2


def test_validate_keeps_a_data_parallel_size_that_is_set(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config.data_parallel_size = 2
    config.validate()
    assert config.data_parallel_size == 2


def test_validate_computes_the_data_parallel_size_for_overlap_too(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    config.validate()
    assert (config.data_parallel_size, config.comm_overlap.data_parallel_size) == (4, 4)


def test_deterministic_mode_switches_torch(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(config, _DETERMINISTIC, monkeypatch)
    config.validate()
    assert torch.are_deterministic_algorithms_enabled()


def test_a_refused_deterministic_mode_does_not_switch_torch(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(config, {**_DETERMINISTIC, "env.NCCL_ALGO": "ring"}, monkeypatch)
    with pytest.raises(AssertionError):
        config._validate_and_apply_deterministic_mode()
    assert not torch.are_deterministic_algorithms_enabled()


@every("scope", ["attn", [CudaGraphScope.attn], "full"])
def test_the_scope_of_graphs_that_are_on_is_kept(scope: Any, config: Any) -> None:
    config.model.cuda_graph_impl, config.model.cuda_graph_scope = "transformer_engine", scope
    check_graphs(config)
    assert config.model.cuda_graph_scope == scope


@pytest.mark.parametrize("section", ["dist", "ddp"])
def test_megatron_fsdp_is_turned_on_in_both_places(section: str, config: Any) -> None:
    getattr(config, section).use_megatron_fsdp = True
    config.validate()
    assert (config.dist.use_megatron_fsdp, config.ddp.use_megatron_fsdp) == (True, True)


@pytest.mark.parametrize(
    ("fsdp", "average", "no_registration", "expected"),
    [(True, True, False, False), (True, True, True, True), (False, True, False, True), (True, False, False, False)],
)
def test_average_in_collective_under_fsdp(
    fsdp: bool, average: bool, no_registration: bool, expected: bool, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config.ddp.use_megatron_fsdp, config.ddp.average_in_collective = fsdp, average
    config.ddp.disable_symmetric_registration = no_registration
    parallel.apply_megatron_fsdp(config)
    assert config.ddp.average_in_collective is expected
    assert ("average_in_collective" in capsys.readouterr().out) is (average and not expected)


@pytest.mark.parametrize("section", ["ddp", "optimizer"])
@pytest.mark.parametrize("fsdp", [True, False])
def test_the_mxfp8_buffer_under_fsdp(section: str, fsdp: bool, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config.ddp.use_megatron_fsdp = fsdp
    getattr(config, section).reuse_grad_buf_for_mxfp8_param_ag = True
    parallel.apply_megatron_fsdp(config)
    assert getattr(config, section).reuse_grad_buf_for_mxfp8_param_ag is not fsdp
    assert ("reuse_grad_buf" in capsys.readouterr().out) is fsdp


def test_other_ranks_do_not_print(
    config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    config.ddp.use_megatron_fsdp = config.ddp.average_in_collective = True
    parallel.apply_megatron_fsdp(config)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("inspect", "checkpoint", "expected"),
    [
        ({"enabled": True}, {}, (".", 0)),
        ({"enabled": True}, {"save": "c", "load": "l", "ckpt_step": 7}, ("c", 7)),
        ({"enabled": True, "log_dir": "d", "init_training_step": 3}, {"load": "l", "ckpt_step": 7}, ("d", 3)),
        ({"enabled": False}, {"save": "c", "load": "l", "ckpt_step": 7}, (None, 0)),
    ],
)
def test_where_tensor_inspection_writes(
    inspect: dict[str, Any], checkpoint: dict[str, Any], expected: tuple[str | None, int], config: Any
) -> None:
    config.tensor_inspect = TensorInspectConfig(**inspect)
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    config.validate()
    assert (config.tensor_inspect.log_dir, config.tensor_inspect.init_training_step) == expected


@pytest.mark.parametrize(
    ("name", "value"), [("eval_iters", 7), ("eval_iters", 0), ("eval_interval", 5), ("skip_train", False)]
)
def test_deprecated_validation_fields_are_moved(sentence: Sentence, name: str, value: Any, config: Any) -> None:
    config.validation.skip_train = True
    setattr(config.train, name, value)
    with pytest.warns(DeprecationWarning, match=f"train.{name}") as caught:
        config.validate()
    sentence(caught.pop(DeprecationWarning).message)  # another release warns of more
    assert (getattr(config.validation, name), getattr(config.train, name)) == (value, None)


def test_a_deprecated_field_does_not_win_twice(config: Any) -> None:
    """Megatron-Bridge copies it again on each call, over what has been set under the new name since."""
    config.train.eval_iters = 7
    with pytest.warns(DeprecationWarning, match="eval_iters"):
        config.validate()
    config.validation.eval_iters = 9
    config.validate()
    assert config.validation.eval_iters == 9


@every(
    "values",
    [
        {},
        {**_SAMPLES, "scheduler.lr_decay_style": "WSD"},
        {"scheduler.lr_decay_style": "WSD", "scheduler.lr_warmup_fraction": 0.3},
        {**_FSDP, "ddp.average_in_collective": True, "rng.te_rng_tracker": True},
        {"dataset": PackingProvider(), "train.micro_batch_size": 2},
        {"dataset": _finetuning(num_workers=0)},
        {
            "tensor_inspect": TensorInspectConfig(enabled=True),
            "peft": PostInitOnly(),
            "checkpoint.pretrained_checkpoint": "/",
        },
    ],
)
def test_a_second_validation_changes_nothing(
    values: dict[str, Any], make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    _set(config, values, monkeypatch)
    config.validate()
    once = _state(config)
    config.validate()
    assert _state(config) == once


def _state(config: Any) -> dict[str, Any]:
    """Return every attribute of every section as text: sections are compared by value, functions by name."""
    sections = {name: getattr(section, "__dict__", section) for name, section in vars(config).items()}
    return {
        name: {key: getattr(value, "__qualname__", str(value)) for key, value in section.items()}
        if isinstance(section, dict)
        else section
        for name, section in sections.items()
    }


def test_a_sample_based_run_can_be_validated_again(config: Any) -> None:
    """In Megatron-Bridge the first call sets `train_iters`, and the second refuses it beside `train_samples`."""
    config.train = TrainingConfig(train_samples=100, micro_batch_size=1, global_batch_size=4)
    for _ in range(3):
        config.validate()
    assert (config.train.train_iters, config.scheduler.lr_decay_steps) == (25, 100)


def test_a_change_between_two_validations_is_seen(config: Any) -> None:
    config.validate()
    config.train.train_iters, config.train.global_batch_size = 20, 8
    config.validate()
    assert (config.scheduler.lr_decay_iters, config.scheduler.lr_decay_steps) == (20, 160)
    config.model.seq_length = 64
    with pytest.raises(AssertionError, match="seq_length"):
        config.validate()


def test_a_run_can_change_from_iterations_to_samples(config: Any) -> None:
    config.validate()
    config.train.train_iters, config.train.train_samples = None, 100
    config.validate()
    assert (config.scheduler.lr_decay_iters, config.scheduler.lr_decay_samples) == (None, 100)


def test_the_model_is_only_looked_at_through_attributes(config: Any) -> None:
    """A model of another kind has no finalize, and not every field."""
    layout = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    config.model = SimpleNamespace(bf16=False, fp16=False, seq_length=32, **layout)
    config.validate()
    assert config.data_parallel_size == 1


def test_the_methods_are_the_rules(config: Any, sentence: Sentence) -> None:
    config.model.cp_comm_type = "a2a+p2p"
    with pytest.raises(AssertionError) as caught:
        config._validate_cp_comm_type()
    sentence(caught)
    config.scheduler.lr_decay_samples = 1
    with pytest.raises(AssertionError, match="lr_decay_samples"):
        config._validate_training_scheduler_compatibility()


def test_the_format_that_fsdp_alone_writes_is_refused_before_async_save_is(config: Any) -> None:
    config.checkpoint.save, config.checkpoint.async_save, config.checkpoint.ckpt_format = "c", True, "fsdp_dtensor"
    with pytest.raises(AssertionError, match="use_megatron_fsdp=True"):
        config.validate()


def test_the_gloo_rule_sees_the_optimizer_that_ddp_asked_for(config: Any) -> None:
    config.ddp.use_distributed_optimizer, config.dist.use_gloo_process_groups = True, False
    config.checkpoint.ckpt_format = "torch"
    with (
        pytest.warns(UserWarning, match="use_distributed_optimizer"),
        pytest.raises(AssertionError, match="use_gloo_process_groups=False"),
    ):
        config.validate()


def test_a_refused_configuration_keeps_its_deprecated_fields(
    config: Any, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    _set(config, {**_DEEPEP, "gpu": TURING, "train.eval_iters": 7}, monkeypatch)
    with pytest.raises(ValueError) as caught:
        config.validate()
    sentence(caught)
    assert (config.train.eval_iters, config.validation.eval_iters) == (7, 100)


# Rules that refuse nothing by themselves, and the tests of what they change
CHANGES_ONLY = {
    "sync_te_rng_tracker": test_the_te_tracker_of_the_model_reaches_the_rng_section,
    "_validate_and_sync_distributed_optimizer_settings": "tests/training/config/test_update.py",
    "let_the_loss_scale_find_overflow": "tests/training/config/test_update.py",
    "fill_in_defaults": test_where_tensor_inspection_writes,
    "move_deprecated_validation_fields": test_deprecated_validation_fields_are_moved,
}


def test_every_rule_is_tested() -> None:
    assert RULES.keys().isdisjoint(CHANGES_ONLY)
    assert {*RULES, *CHANGES_ONLY} == {rule.__name__ for rule in validate.CHECKS}
    assert all(rule.legal and rule.illegal for rule in RULES.values())
