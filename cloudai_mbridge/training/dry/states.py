"""What a built rank holds between steps: parameters, gradients, optimizer states, and its shares of a checkpoint."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.tensor import DTensor

from cloudai_mbridge.training.checkpointing.content import content_metadata, model_tree
from cloudai_mbridge.training.checkpointing.optimizer_state import parts_of


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, of sharded ones those of this rank."""
    return sum(own.numel() * own.element_size() for own in map(_own, tensors))


def _own(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that Megatron-FSDP has sharded."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def parameters(chunks: list[Any]) -> dict[str, int]:
    """Return the number of parameters, of all, of routed experts and of those that are trained, and their bytes."""
    every = [each for chunk in chunks for each in chunk.parameters()]
    return {
        "count": sum(each.numel() for each in every),
        "experts": sum(each.numel() for each in every if not getattr(each, "allreduce", True)),
        "trained": sum(each.numel() for each in every if each.requires_grad),
        "bytes": size_of(every),
    }


_PER_TENSOR = ("Float8Quantizer", "Float8CurrentScalingQuantizer")


def weights(chunks: list[Any]) -> dict[str, int]:
    """Return the bytes of the weights as they are trained, and the share of those that are quantized.

    Transformer Engine quantizes a layer's weights when it draws their values. Its quantizers make such a weight here,
    of all the tensors that it has: data by rows and by columns, and scales.
    """
    plain = quantized = 0
    for chunk in chunks:
        if (sharded := getattr(chunk, "param_and_grad_buffer", None)) is not None:  # of Megatron-FSDP
            for group in sharded.parameter_groups:
                for name in ("model_weight_buffer", "transpose_weight_buffer"):
                    plain += _kept(getattr(group, name, None))[1]
            continue
        done = set()
        for module in chunk.modules():
            metas = getattr(module, "param_init_meta", {}) if getattr(module, "primary_weights_in_fp8", False) else {}
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in done:
                    continue
                done.add(parameter)
                index = getattr(metas.get(name), "fp8_meta_index", None)
                if index is None:
                    plain += size_of([parameter])
                else:
                    quantized += _quantized(module.quantizers["scaling_fwd"][index], parameter)
    return {"bytes": plain + quantized, "quantized": quantized}


def _quantized(quantizer: Any, parameter: torch.Tensor) -> int:
    count = parameter.numel()
    if type(quantizer).__name__ in _PER_TENSOR:
        # Its making asks the driver. One scale; a transpose where products need it, before Blackwell
        return count * (1 if torch.cuda.get_device_capability()[0] >= 10 else 2) + torch.float32.itemsize
    quantizer = copy.copy(quantizer)
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = True  # no tensor's class around it, which would need a device
    made = quantizer.make_empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return size_of({id(each): each for each in vars(made).values() if isinstance(each, torch.Tensor)}.values())


def gradients(chunks: list[Any]) -> dict[str, int]:
    """Return the values and bytes of the gradients that the rank keeps, with the padding of their buffers."""
    count = total = buckets = 0
    for chunk in chunks:
        if (sharded := getattr(chunk, "param_and_grad_buffer", None)) is not None:  # of Megatron-FSDP
            for group in sharded.parameter_groups:
                values, size = _kept(group.main_grad_buffer)
                count, total, buckets = count + values, total + size, buckets + (values > 0)
            continue
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
            count += buffer.grad_data.numel()
            total += size_of([buffer.grad_data])
            buckets += len(buffer.buckets)
    return {"count": count, "bytes": total, "buckets": buckets}


def _kept(buffer: Any) -> tuple[int, int]:
    """Return the values and bytes of a buffer of Megatron-FSDP, None: there is none."""
    return (0, 0) if buffer is None else (buffer.data_size, buffer.data_size * buffer.dtype.itemsize)


def optimizer_states(config: Any, optimizer: Any) -> dict[str, int]:
    """Return the values that the rank's share of the optimizer steps, and the bytes of main parameters and moments."""
    settings = config.optimizer
    count = main = 0
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups if getattr(part, "optimizer", None) is not None else ():
            count += sum(_own(each).numel() for each in group["params"])
            main += size_of(group["params"])
    is_aware = settings.use_precision_aware_optimizer
    moments = [settings.exp_avg_dtype, settings.exp_avg_sq_dtype] if is_aware else [torch.float32] * 2
    return {"count": count, "main_bytes": main, "moment_bytes": count * sum(each.itemsize for each in moments)}


# Of a shard: key, whole shape, offset, own shape, bytes, and whether this rank is the one that saves it
Shard = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]


def shards(config: Any, chunks: list[Any]) -> list[Shard]:
    """Return the rank's shards of the model in a checkpoint."""
    tree = model_tree(chunks, content_metadata(config.checkpoint, config.peft))
    apply_factories(tree)
    found = []
    for each in nested_values(tree):
        if isinstance(each, ShardedTensor):
            replica = each.replica_id if isinstance(each.replica_id, tuple) else (each.replica_id,)
            saved = math.prod(each.local_shape) * each.dtype.itemsize
            shape, offset = tuple(each.global_shape), tuple(each.global_offset)
            found.append((each.key, shape, offset, tuple(each.local_shape), saved, not any(replica)))
    return found
