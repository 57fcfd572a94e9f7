"""Refusal of configurations that this process cannot train: Megatron-Core would fail midway or train something else."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.versions import GPU, TRANSFORMER_ENGINE, installed_release
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.data.finetuning import has_packed_sequences, is_packed
from cloudai_mbridge.training.data.packed_batch import NUMBERS_TOKENS
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models import engine_layers
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
from cloudai_mbridge.training.models.hybrid_provider import HybridModelProvider
from cloudai_mbridge.training.models.layer_specs import (
    has_transformer_engine,
    local_layer_spec,
    modelopt_transformer_layer_spec,
)
from cloudai_mbridge.training.peft.config import LoRA
from cloudai_mbridge.training.schema import packages
from cloudai_mbridge.training.schema.not_done import asked_for, needed, other_than

_Get = Callable[[str, str, Any], Any]

_FUSED_EXPERTS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"

# Fields that cannot be combined with a feature -> their harmless values
_WITH_ADAPTERS = {
    "ddp.use_megatron_fsdp": False,
    "dist.use_megatron_fsdp": False,
    "dist.use_torch_fsdp2": False,
    "model.qk_clip": False,  # it changes weights that are not saved
    # Their products do not go through the layers that have adapters
    "model.use_transformer_engine_op_fuser": False,
    # A checkpoint of adapters lacks the quantizers of the weights, so no run can resume from it
    "model.restore_modelopt_state": False,
    # A frozen weight has no gradient to compute later
    "model.delay_wgrad_compute": False,
}
_WITH_FSDP2 = {
    "optimizer.use_distributed_optimizer": False,
    "model.expert_model_parallel_size": 1,  # it would average different experts
    "model.calculate_per_token_loss": False,  # nothing divides the gradients
    "ddp.num_distributed_optimizer_instances": 1,
}
_WITH_MODELOPT = {
    "model.virtual_pipeline_model_parallel_size": None,
    "checkpoint.non_persistent_ckpt_type": None,
    "ddp.use_megatron_fsdp": False,
}


def check_values(config: ConfigContainer) -> None:
    """Refuse values that would fail later, on every rank, with an unclear message. Raises ConfigError."""
    optimizer, train = config.optimizer, config.train
    for name, value in (("micro_batch_size", train.micro_batch_size), ("global_batch_size", train.global_batch_size)):
        if value is None or value < 1:
            raise ConfigError(f"train.{name} = {value} is not a number of sequences; use at least 1")
    if optimizer.lr is None or not 0 <= (0.0 if optimizer.min_lr is None else optimizer.min_lr) <= optimizer.lr:
        raise ConfigError(f"optimizer: lr = {optimizer.lr} and min_lr = {optimizer.min_lr}; use 0 <= min_lr <= lr")
    if optimizer.min_lr is None:
        optimizer.min_lr = 0.0
    for name in ("log_interval", "tensorboard_log_interval"):
        if (value := getattr(config.logger, name)) < 1:
            raise ConfigError(f"logger.{name} = {value} is not a number of steps; use at least 1")
    path = config.logger.save_config_filepath
    if path and not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"logger.save_config_filepath = {path!r}: its directory cannot be written")


def check_resolved(config: ConfigContainer) -> None:
    """Refuse a configuration whose derived values do not fit each other, or this machine. Raises ConfigError."""
    model: Any = config.model
    half = model.bf16 or model.fp16
    if config.optimizer.optimizer_cpu_offload and config.optimizer.use_distributed_optimizer and not half:
        raise ConfigError(
            "optimizer.optimizer_cpu_offload = True cannot be combined with use_distributed_optimizer = True in fp32;"
            " use False for one of them, or a precision of 16 bits"
        )
    _check_parallelism(config)
    _check_installed(model)
    _check_fused_experts(model)


def _check_parallelism(config: ConfigContainer) -> None:
    """Refuse sizes that pipeline, data and tensor parallelism cannot split."""
    model: Any = config.model
    if model.virtual_pipeline_model_parallel_size is not None and not model.overlap_p2p_comm:
        # Megatron-Core would train them wrongly and report no error
        raise ConfigError("comm_overlap.overlap_p2p_comm = False: virtual pipeline stages need it; remove it")
    total, micro = required(config.train.global_batch_size), required(config.train.micro_batch_size)
    replicas = required(config.data_parallel_size)
    if total % (micro * replicas):
        raise ConfigError(
            f"train.global_batch_size = {total} is not a multiple of micro_batch_size x data-parallel size ="
            f" {micro} x {replicas}: the global batch size has to hold whole micro-batches"
        )
    evaluated, own_micro = config.eval_batch_sizes
    if min(evaluated, own_micro) < 1 or evaluated % (own_micro * replicas):
        raise ConfigError(
            f"validation.eval_global_batch_size = {evaluated} is not a multiple of eval_micro_batch_size x"
            f" data-parallel size = {own_micro} x {replicas}; null means as in training"
        )
    size, tp = model.vocab_size, model.tensor_model_parallel_size
    if size is not None and not model.should_pad_vocab and size % tp:
        raise ConfigError(
            f"model.vocab_size = {size} is not a multiple of model.tensor_model_parallel_size = {tp};"
            " use a multiple, or set model.should_pad_vocab=True"
        )


def _check_installed(model: Any) -> None:
    """Refuse experts and layers whose package is missing: Megatron-Core would fail midway. Raises ConfigError."""

    def get(_: str, name: str, default: Any) -> Any:
        return getattr(model, name, default)

    def has(module: str) -> bool:
        return find_spec(module) is not None

    is_hybrid = getattr(model, "is_hybrid_model", False) and hasattr(model, "hybrid_layer_pattern")
    pattern = (model.hybrid_layer_pattern or "M") if is_hybrid else ""  # ratios alone leave Mamba in the rest
    for message in (*packages.for_exchange(get, has), *packages.for_layers(get, has, pattern)):
        raise ConfigError(message)


def _check_fused_experts(model: Any) -> None:
    """Refuse experts without a form of fused operations: Megatron-Core fails in the middle of building the model."""
    if not (model.num_moe_experts and getattr(model, "use_transformer_engine_op_fuser", False)):
        return
    etp = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    is_named = os.environ.get(_FUSED_EXPERTS, "0") != "0"  # Megatron-Core 0.19 refuses without, on any GPU
    needs = {
        f"model.expert_tensor_parallel_size = 1, not {etp}": etp == 1,
        "model.moe_grouped_gemm = True": model.moe_grouped_gemm,
        "model.moe_apply_probs_on_input = False": not model.moe_apply_probs_on_input,
        f"{_FUSED_EXPERTS}=1 in env_vars": is_named or not model.gated_linear_unit or installed_release() == "0.18",
    }
    if missing := [name for name, is_there in needs.items() if not is_there]:
        raise ConfigError(
            f"model.use_transformer_engine_op_fuser = True with experts needs {', '.join(missing)};"
            " provide it, or set it to False"
        )


def refuse_unsupported(config: ConfigContainer) -> None:
    """Refuse settings that the loop would ignore: a ConfigError names each field, its value and the harmless value."""

    def get(section: str, name: str, default: Any) -> Any:
        return getattr(getattr(config, section), name, default)  # a section that is None has no field

    asked = [*asked_for(get), *_asked_of_model(config, get), *_asked_of_sharding(config, get)]
    if isinstance(config.peft, LoRA):
        asked += other_than({"peft.lora_dtype": None, "peft.experts_shared_outer_loras": False}, get)
    if config.peft is not None:
        asked += other_than(_WITH_ADAPTERS, get, " with peft")
    if asked:
        raise ConfigError(f"the training loop does not do this: {'; '.join(asked)}")
    missing = [*needed(get, _lacking())]
    graphs, model = cuda_graphs.implementation(config.model), config.model
    if graphs == "transformer_engine" and torch.cuda.is_available() and not has_transformer_engine():
        missing.append("model.cuda_graph_impl = 'transformer_engine' needs Transformer Engine (use 'local')")
    if isinstance(model, HybridModelProvider) and model.pattern is None and not has_transformer_engine():
        name = type(model).__name__
        missing.append(f"model = {name} without hybrid_layer_pattern: Mamba layers need {TRANSFORMER_ENGINE}")
    if missing:
        raise ConfigError(f"this machine cannot train that: {'; '.join(missing)}")


def _lacking() -> set[str]:
    has = {GPU: torch.cuda.is_available(), TRANSFORMER_ENGINE: has_transformer_engine()}
    return {what for what, is_there in has.items() if not is_there}


def _asked_of_model(config: ConfigContainer, get: _Get) -> Iterator[str]:
    model: Any = config.model
    if isinstance(model, HybridModelProvider):
        if (stages := model.virtual_pipeline_model_parallel_size) is not None:  # nor does Megatron-Bridge build them
            yield f"model.virtual_pipeline_model_parallel_size = {stages} of a hybrid model (use None)"
    elif not isinstance(model, GPTModelProvider):
        yield f"model = {type(model).__name__} (use GPTModelProvider, MLAModelProvider or HybridModelProvider)"
    elif has_transformer_engine() and model.transformer_layer_spec is local_layer_spec:
        yield "model.transformer_layer_spec = local_layer_spec (Transformer Engine is installed, and used)"
    if has_transformer_engine() and getattr(model, "transformer_impl", None) == "local":
        yield "model.transformer_impl = 'local' (Transformer Engine is installed, and used)"
    stages = getattr(getattr(model, "pipeline_model_parallel_layout", None), "layout", [[]])[0]  # of the first rank
    if any(LayerType.mtp in stage for stage in stages[1:]):  # Megatron-Core would wait, or embed with zeros
        layout = model.pipeline_model_parallel_layout
        yield (
            f"model.pipeline_model_parallel_layout = {layout} with m on the first pipeline rank, behind its stage with"
            " E (use another rank for m)"
        )
    tp, ep = model.tensor_model_parallel_size, model.expert_model_parallel_size
    if model.num_moe_experts and ep == 1 and (etp := model.expert_tensor_parallel_size or tp) != tp:
        # Megatron-Core reduces the experts' gradients over the groups of the dense layers then
        field = "model.expert_tensor_parallel_size"
        yield f"{field} = {etp} with expert_model_parallel_size = 1 and tensor_model_parallel_size = {tp} (use {tp})"
    known = {each.name for each in fields(TransformerConfig)}  # to the installed Megatron-Core
    fuser = "use_transformer_engine_op_fuser"
    if model.num_moe_experts and getattr(model, fuser, False) and fuser not in known:
        yield f"model.{fuser} = True with experts (use False: it needs Megatron-Core 0.18)"
    if getattr(model, "dense_grouped_gemm", False) and "use_grouped_gemm_for_dense_mlp" not in known:
        yield "model.dense_grouped_gemm = True (use False: it needs Megatron-Core 0.18)"
    yield from _of_modelopt(config, get)
    if getattr(model, engine_layers.FIELD, False) and has_transformer_engine():
        yield from engine_layers.unlike(model)
    if getattr(model, "qk_clip", False):  # Megatron-Core's `clip_qk` assumes other shapes of the weights
        if tp > 1 and not model.multi_latent_attention:
            yield f"model.qk_clip = True with tensor_model_parallel_size = {tp} (use 1, or multi-latent attention)"
        if config.optimizer.use_distributed_optimizer and (model.bf16 or model.fp16):
            yield "model.qk_clip = True in 16 bits with optimizer.use_distributed_optimizer = True (use False)"
    yield from _of_documents(config)


def _of_modelopt(config: ConfigContainer, get: _Get) -> Iterator[str]:
    """Yield parts that ModelOpt does not restore, and attention to later tokens, which no mask hides."""
    model: Any = config.model
    if getattr(model, "restore_modelopt_state", False):
        yield from other_than(_WITH_MODELOPT, get, " with model.restore_modelopt_state = True")
    if has_transformer_engine() and getattr(model, "transformer_layer_spec", None) is modelopt_transformer_layer_spec:
        given = model.use_arbitrary_attention_mask
        has_mask = getattr(config.dataset, "skip_getting_attention_mask_from_dataset", True) is False
        if not has_mask and (model.context_parallel_size == 1 if given is None else given):
            mask = "dataset.skip_getting_attention_mask_from_dataset = False"
            yield f"model.use_arbitrary_attention_mask = {given!r} without a mask (use False, or {mask})"


def _of_documents(config: ConfigContainer) -> Iterator[str]:
    """Yield masks that would not end attention with a document, which Megatron-Core does not report.

    Bounds of documents need whole sequences in one row: documents have any length.
    """
    dataset: Any = config.dataset
    has_mamba = isinstance(config.model, HybridModelProvider) and "M" in (config.model.pattern or "M")
    if has_mamba and has_packed_sequences(dataset) and not NUMBERS_TOKENS:
        name = "packed_sequence_specs" if is_packed(dataset) else "inter_document_masking"
        yield f"dataset.{name} with Mamba layers, whose state would cross sequences (install Megatron-Core 0.17)"
    if getattr(dataset, "reset_attention_mask", False):
        spec = getattr(config.model, "transformer_layer_spec", None)
        if has_transformer_engine() and spec is not modelopt_transformer_layer_spec:
            yield (
                "dataset.reset_attention_mask = True (use False: causal attention of Transformer Engine takes no mask)"
            )
        elif dataset.skip_getting_attention_mask_from_dataset or not dataset.create_attention_mask:
            yield (
                "dataset.reset_attention_mask = True without a mask (use False, or set create_attention_mask = True and"
                " skip_getting_attention_mask_from_dataset = False)"
            )
    if getattr(dataset, "inter_document_masking", False):
        sizes: Mapping[str, Any] = {
            "train.micro_batch_size": config.train.micro_batch_size,
            "validation.eval_micro_batch_size": config.eval_batch_sizes[1],
            "model.context_parallel_size": config.model.context_parallel_size,
        }
        for field, size in sizes.items():
            if size != 1:
                yield f"{field} = {size} with dataset.inter_document_masking = True (use 1)"


def _asked_of_sharding(config: ConfigContainer, get: _Get) -> Iterator[str]:
    """Yield combinations with Megatron-FSDP or torch's FSDP2, or with parts of the first without it."""
    model: Any = config.model
    ddp, checkpoint, is_fsdp2 = config.ddp, config.checkpoint, config.dist.use_torch_fsdp2
    if is_fsdp2:
        yield from other_than(_WITH_FSDP2, get, " with dist.use_torch_fsdp2 = True")
    is_on = ddp.use_megatron_fsdp or config.dist.use_megatron_fsdp
    if getattr(model, "init_model_with_meta_device", False) and not is_on:
        yield "model.init_model_with_meta_device = True without ddp.use_megatron_fsdp (use False)"
    stages, instances = model.virtual_pipeline_model_parallel_size, ddp.num_distributed_optimizer_instances
    if is_on and stages is not None and checkpoint.ckpt_format == "fsdp_dtensor":
        yield f"model.virtual_pipeline_model_parallel_size = {stages} with ckpt_format = 'fsdp_dtensor' (use None)"
    outer, inner = ddp.outer_dp_sharding_strategy, ddp.data_parallel_sharding_strategy
    if is_on and outer != "no_shard" and (instances < 2 or inner != "optim_grads_params"):
        yield (
            f"ddp.outer_dp_sharding_strategy = {outer!r} with num_distributed_optimizer_instances = {instances} and"
            f" data_parallel_sharding_strategy = {inner!r} (use 'no_shard', or 2 or more and 'optim_grads_params')"
        )
    adds_twice = is_on and inner in ("optim_grads", "optim_grads_params") and installed_release() == "0.16"
    if adds_twice and (part := _on_one_rank(config)):
        yield f"ddp.use_megatron_fsdp = True with {part} on one data-parallel rank (install Megatron-Core 0.19)"
    if instances > 1 and is_on and checkpoint.save is not None:
        yield f"checkpoint.save with {instances} instances of Megatron-FSDP's optimizer (remove it)"
    saves = checkpoint.save is not None or checkpoint.load is not None
    if (is_fsdp2 or is_on) and saves and installed_release() in ("0.16", "0.17", "0.18"):
        yield "checkpoints of sharded parameters (install Megatron-Core 0.19, or remove checkpoint.save and load)"


def _on_one_rank(config: ConfigContainer) -> str:
    """Return the part whose shards are all on one rank, or "": Megatron-Core 0.16 adds up its gradients twice."""
    model: Any = config.model
    replicas = getattr(config, "data_parallel_size", None)
    if replicas is None:  # not derived yet; the check runs again once it is
        return ""
    tp, instances = model.tensor_model_parallel_size, config.ddp.num_distributed_optimizer_instances
    ranks = replicas * model.context_parallel_size
    if ranks == instances:
        return "the model"
    of_expert = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or tp)
    return "its experts" if model.num_moe_experts and ranks * tp == of_expert * instances else ""
