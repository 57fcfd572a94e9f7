"""The communication-overlap section of a training config, and its way onto the model, optimizer and DDP configs."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import is_torch_min_version

from cloudai_mbridge.training.comm_overlap.user_buffers import TransformerLayerTPOverlapCfg, as_te_dict
from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.transformer_engine import describe_te, have_te, te_is_at_least

logger = logging.getLogger(__name__)

# Elements per gradient bucket: large enough that its reduction is bound by bandwidth, not latency
_BUCKET_SIZE = 128 * 1024 * 1024
_EXPERT_OVERLAP = "overlap_moe_expert_parallel_comm"
_DELAYED_WGRAD = "delay_wgrad_compute"

_Rule = tuple[bool, str]  # whether it holds, and the message if not


@dataclass(kw_only=True)
class CommOverlapConfig:
    """Overlap of communication with computation. None derives a setting from the parallel sizes.

    Fields and defaults match Megatron-Bridge's class of this name. `setup` writes the settled values to the
    other configs and leaves this one as it was written.
    """

    tp_comm_overlap: bool
    tp_comm_overlap_cfg: TransformerLayerTPOverlapCfg | None = None
    tp_comm_bootstrap_backend: str | None = "nccl"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    """Elements per gradient bucket."""
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None
    """Micro-batches whose embedding gradient may wait; -1 means all."""
    data_parallel_size: int | None = None
    """Replicas; the config container fills it in."""
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None

    def __post_init__(self) -> None:
        self.user_comm_overlap_cfg: SimpleNamespace | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field. A layer config is copied, so that changing it here does not change the preset for others."""
        object.__setattr__(self, name, copy.deepcopy(value) if name == "tp_comm_overlap_cfg" else value)

    def finalize(self) -> None:
        """Record the user's settings. Only the first call does: later changes of fields have no effect on `setup`."""
        if self.user_comm_overlap_cfg is None:
            self.user_comm_overlap_cfg = SimpleNamespace(**{f.name: getattr(self, f.name) for f in fields(self)})

    def setup(self, model_config: Any, optimizer_config: Any, ddp_config: Any) -> None:
        """Settle every overlap and write it to the configs that have a field of its name.

        Tensor-parallel overlap that cannot work is turned off with a warning. Nothing is written when a rule is broken.
        Raises AssertionError for a model that cannot overlap its experts' communication or delay its weight gradients,
        ValueError for an unknown data-parallel size.
        """
        self.finalize()
        user = vars(self.user_comm_overlap_cfg or SimpleNamespace())
        data_parallel = self._resolve_data_parallel(user, model_config, optimizer_config, ddp_config)
        staged = model_config.pipeline_model_parallel_size > 1
        interleaved = staged and _num_chunks(model_config) > 1
        # Interleaved stages exchange often, so their messages overlap with products; a plain 1F1B schedule sends and
        # receives in one batch
        defaults = {
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": staged and not interleaved,
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": -1,
            _EXPERT_OVERLAP: False,
            _DELAYED_WGRAD: False,
        }
        model = _prefer(user, defaults)
        if not hasattr(model_config, _EXPERT_OVERLAP):
            raise AssertionError(f"{type(model_config).__name__} has no field {_EXPERT_OVERLAP}")
        has_overlap = model[_EXPERT_OVERLAP]
        if has_overlap:
            _require(_EXPERT_OVERLAP, _expert_overlap_rules(model_config))
        if model[_DELAYED_WGRAD]:
            reduces_beside = data_parallel.get("overlap_grad_reduce", getattr(ddp_config, "overlap_grad_reduce", False))
            _require(_DELAYED_WGRAD, _delayed_wgrad_rules(model_config, has_overlap, reduces_beside))
        for name in (_EXPERT_OVERLAP, _DELAYED_WGRAD):
            if getattr(model_config, name, False) and not model[name]:  # this section decides
                logger.warning("model.%s is turned off: set comm_overlap.%s to have it", name, name)
        _write(model, model_config)
        _write_tensor_parallel(user, model_config)
        _write(data_parallel, optimizer_config)
        # DDP hooks weight gradients differently if they come late
        _write({**data_parallel, _DELAYED_WGRAD: model[_DELAYED_WGRAD]}, ddp_config)

    def _resolve_data_parallel(self, user: Mapping[str, Any], model: Any, optimizer: Any, ddp: Any) -> dict[str, Any]:
        """Return the overlap of gradients and parameters; {} unless DDP and distributed optimizer are Megatron's."""
        if not isinstance(optimizer, OptimizerConfig) or not isinstance(ddp, DistributedDataParallelConfig):
            return {}
        if not ddp.use_distributed_optimizer:
            return {}
        if self.data_parallel_size is None:
            raise ValueError("comm_overlap.data_parallel_size is unknown; set it before setup()")
        replicated = self.data_parallel_size > 1
        defaults = {
            "bucket_size": _BUCKET_SIZE if replicated and getattr(ddp, "num_buckets", None) is None else None,
            "overlap_grad_reduce": replicated,
            "overlap_param_gather": replicated,
            "overlap_param_gather_with_optimizer_step": False,
            "align_param_gather": replicated and model.pipeline_model_parallel_size > 1 and _num_chunks(model) > 1,
        }
        return _prefer(user, defaults)


def _write_tensor_parallel(user: Mapping[str, Any], model: Any) -> None:
    is_on = bool(user["tp_comm_overlap"])
    if is_on:
        obstacle = None
        if model.tensor_model_parallel_size < 2:
            obstacle = f"tensor_model_parallel_size is {model.tensor_model_parallel_size}; it takes 2 or more"
        elif not model.sequence_parallel:
            obstacle = "sequence_parallel is off"
        elif not have_te():
            obstacle = "Transformer Engine is not installed"
        if obstacle:
            logger.warning("tensor-parallel communication overlap is turned off: %s", obstacle)
        is_on = obstacle is None
    layer = user["tp_comm_overlap_cfg"] if is_on else None
    if is_on and layer is None:
        logger.warning("tensor-parallel communication overlap has no tp_comm_overlap_cfg: Transformer Engine decides")
    _write({"tp_comm_overlap": is_on, "tp_comm_overlap_cfg": None}, model)
    if user["tp_comm_bootstrap_backend"] is not None:
        _write({"tp_comm_bootstrap_backend": user["tp_comm_bootstrap_backend"]}, model)
    if is_on:
        # No field of Megatron-Core's own config: the code that starts the user buffers reads it
        model.tp_comm_overlap_cfg = None if layer is None else as_te_dict(layer)


def _write(values: Mapping[str, Any], config: Any) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def _num_chunks(model: Any) -> int:
    return model.virtual_pipeline_model_parallel_size or 1


def _prefer(user: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default if user[name] is None else user[name] for name, default in defaults.items()}


def _require(subject: str, rules: Iterable[_Rule]) -> None:
    """Raise AssertionError for the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise AssertionError(f"{subject} requires {message}")


def _expert_overlap_rules(model: Any) -> Iterator[_Rule]:
    """Yield the conditions for overlapping the experts' all-to-all with another micro-batch's products."""
    experts, ep = model.num_moe_experts, model.expert_model_parallel_size
    yield ep > 1, f"expert_model_parallel_size > 1, not {ep}"
    yield experts is not None and experts > 1, f"num_moe_experts > 1, not {experts}"
    dispatcher = model.moe_token_dispatcher_type
    yield dispatcher in ("alltoall", "flex"), f'moe_token_dispatcher_type "alltoall" or "flex", not "{dispatcher}"'
    yield model.bf16 or model.fp16, "bf16 or fp16"
    # Earlier releases hang
    yield is_torch_min_version("2.6.0"), f"torch >= 2.6.0; {torch.__version__} is installed"
    virtual = model.virtual_pipeline_model_parallel_size
    yield (
        model.pipeline_model_parallel_size == 1 or virtual is not None,
        f"virtual_pipeline_model_parallel_size with pipeline_model_parallel_size {model.pipeline_model_parallel_size}",
    )
    yield model.recompute_granularity != "full", 'recompute_granularity other than "full"'
    yield model.recompute_method is None, f'recompute_method None, not "{model.recompute_method}"'
    yield model.recompute_num_layers is None, f"recompute_num_layers None, not {model.recompute_num_layers}"
    yield not model.moe_shared_expert_overlap, "moe_shared_expert_overlap off"
    yield model.mtp_num_layers in (None, 0, 1), f"mtp_num_layers None, 0 or 1, not {model.mtp_num_layers}"


def _delayed_wgrad_rules(model: Any, expert_overlap: bool, grad_reduce_overlap: bool) -> Iterator[_Rule]:
    """Yield the conditions for computing weight gradients apart from input gradients. The flags are settled values."""
    yield expert_overlap, f"{_EXPERT_OVERLAP} in comm_overlap"
    te_27 = te_is_at_least("2.7.0")
    for name, is_on in (
        ("overlap_grad_reduce", grad_reduce_overlap),
        ("gradient_accumulation_fusion", model.gradient_accumulation_fusion),
    ):
        yield te_27 or not is_on, f"Transformer Engine >= 2.7.0 together with {name}; {describe_te()}"
    scopes = cuda_graphs.captured(model)
    has_attention = "attn" in scopes
    has_shared_expert = getattr(model, "moe_shared_expert_intermediate_size", None) is not None
    # a graph of the router holds the shared expert unless that runs on its own stream
    graphs_shared_expert = has_shared_expert and not getattr(model, "moe_shared_expert_overlap", False)
    if not has_attention and not ("moe_router" in scopes and graphs_shared_expert):
        return
    yield te_is_at_least("2.12.0"), f"Transformer Engine >= 2.12.0 inside a CUDA graph; {describe_te()}"
    # Without it gradients are accumulated at changing addresses, which a graph cannot replay
    yield model.gradient_accumulation_fusion, "gradient_accumulation_fusion inside a CUDA graph"
    for name in ("add_bias_linear", "add_qkv_bias"):
        yield not (has_attention and getattr(model, name)), f"{name} off with attention in a CUDA graph"
