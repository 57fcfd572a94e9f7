"""Hooks on a freshly built model: frozen routers, and value heads in place of the output layer."""

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

ModelList: TypeAlias = list[MegatronModule]
ModelHook: TypeAlias = Callable[[MegatronModule | ModelList], ModelList]


def _ensure_model_list(model: Any) -> ModelList:
    """Return a list as it is, and anything else as the only element of one."""
    return model if isinstance(model, list) else [model]


def freeze_moe_router(model: Any) -> ModelList:
    """Stop training the router and the gate of the shared experts in every layer; return the chunks.

    Give it the chunks as they are built, before they are wrapped. Layers without a router are passed over. It may be
    called again.
    """
    chunks = _ensure_model_list(model)
    for chunk in chunks:
        for layer in getattr(getattr(chunk, "decoder", None), "layers", None) or ():
            mlp = getattr(layer, "mlp", None)
            for owner, names in (("router", ("weight", "bias")), ("shared_experts", ("gate_weight", "gate_bias"))):
                for name in names:
                    _freeze_parameter_if_present(getattr(mlp, owner, None), name)
    return chunks


def _freeze_parameter_if_present(module: object, name: str) -> None:
    """Stop training the parameter of this name; None and a missing one are passed over."""
    if (parameter := getattr(module, name, None)) is not None:
        parameter.requires_grad = False


class LinearForLastLayer(torch.nn.Linear):
    """A linear layer without bias, the same on every tensor-parallel rank; its output is fp32.

    sequence_parallel: its input is sharded along the sequence, its output whole; the weight is tagged so that its
    gradient is summed over the tensor-parallel ranks.
    """

    def __init__(self, input_size: int, output_size: int, sequence_parallel: bool) -> None:
        super().__init__(in_features=input_size, out_features=output_size, bias=False)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return (values [sequence, batch, output_size] in fp32, no bias).

        weight and runtime_gather_output: passed by Megatron's models to an output layer; ignored.
        """
        values = super().forward(input_.to(self.weight.dtype)).float()
        if self.sequence_parallel:
            # every rank computes the same loss from the whole sequence, so each keeps its part of the gradient
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def create_value_head_hook(hidden_size: int, sequence_parallel: bool, output_size: int = 1) -> ModelHook:
    """Return a hook that gives the last stage a value head of `output_size` outputs; call it before wrapping.

    The hook raises ValueError if the numbers of chunks and virtual stages differ.
    """
    _register_linear_for_last_layer_mapping()

    def hook(model: Any) -> ModelList:
        chunks = _ensure_model_list(model)
        stages = mpu.get_virtual_pipeline_model_parallel_world_size()
        flags = [mpu.is_pipeline_last_stage()]
        if mpu.get_pipeline_model_parallel_world_size() > 1 and stages is not None:
            flags = [mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage) for stage in range(stages)]
        if len(flags) != len(chunks):
            raise ValueError(f"{len(chunks)} model chunks for {len(flags)} virtual stages of this rank")
        for chunk, is_last in zip(chunks, flags, strict=True):
            if is_last:
                head = LinearForLastLayer(hidden_size, output_size, sequence_parallel)
                weight = getattr(getattr(chunk, "output_layer", None), "weight", None)  # of the layer it replaces
                chunk.output_layer = head.to(weight.device) if isinstance(weight, torch.Tensor) else head
        return chunks

    return hook


def make_value_model(hidden_size: int, sequence_parallel: bool) -> ModelHook:
    """Return a hook that makes a value model: one output per token."""
    return create_value_head_hook(hidden_size, sequence_parallel, output_size=1)


def _register_linear_for_last_layer_mapping() -> None:
    """Register the head as replicated with Megatron-Bridge's weight conversion, if installed."""
    try:
        mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    except ImportError:
        return
    mapping.register_module_type(LinearForLastLayer.__name__, "replicated")
