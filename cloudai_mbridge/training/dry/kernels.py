"""Transformer Engine's compiled functions on the meta device: the shapes of what they return, and their FLOPs.

Its Python, with all that layers keep for the backward pass, is the real one. Import it where that is installed.
"""
# ruff: noqa: N803

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
import transformer_engine_torch as tex
import triton
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.ops import basic as ops
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage, nvfp4_tensor_storage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

Maybe = torch.Tensor | None
_META = torch.device("meta")
_TYPES = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
# What they answer of the machine, with a cuDNN that has attention in MXFP8 (since 9.21): of its kernels, Python chooses
_MACHINE: dict[str, Callable[..., Any]] = {
    "get_cublasLt_version": lambda: 130500,
    "get_cudnn_version": lambda: 92200,
    "get_num_cublas_streams": lambda: 4,
    "device_supports_multicast": lambda device_id=-1: True,
    "get_stream_priority_range": lambda device_id=-1: (0, -5),
}
# Functions that write values alone
_WITHOUT_RESULT = (
    *("compute_amax", "fused_amax_and_scale_update_after_reduction", "swizzle_scales_for_gemm_"),
    *("fused_multi_row_padding", "fused_multi_row_unpadding", "thd_out_correction", "thd_grad_correction"),
    *("thd_second_half_lse_correction", "fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd"),
    *("multi_tensor_swizzle_scales_for_gemm_unchecked_", "copy_data_ptrs_to_device"),
    *("fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast", "mxfp8_scaling_partial_cast"),
    *("mxfp8_scaling_compute_partial_amax", "nvfp4_multi_tensor_compute_partial_amax", "nvfp4_compute_global_scale"),
    *("nvfp4_multi_tensor_2d_partial_cast", "nvfp4_multi_tensor_fused_scale", "nvfp4_2d_multi_tensor_transpose"),
    *("nvfp4_2d_scale_transpose", "nvfp4_data_transpose"),
)
# Where a step's FLOPs are noted
_NOTE: list[Callable[[int], None]] = [lambda flops: None]


def note_flops(note: Callable[[int], None]) -> None:
    """Have the FLOPs of every product and attention given to a function from now on."""
    _NOTE[0] = note


def install() -> None:
    """Replace the functions in this process, once and for good."""
    made = _functions()
    originals = {id(getattr(tex, name)): each for name, each in made.items() if hasattr(tex, name)}
    for module in [tex, *_importers()]:
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
    for storage in (mxfp8_tensor_storage._FromMXFP8Func, nvfp4_tensor_storage._FromNVFP4Func):
        storage.forward = staticmethod(_dequantized)  # which moves the tensor to a GPU
    distributed._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = _without_result
    operations: list[Any] = [each for each in vars(ops).values() if isinstance(each, type)]
    for each in operations:  # which make parameters on the meta device anew before their first pass
        if "pre_first_fuser_forward" in vars(each):
            each.pre_first_fuser_forward = _without_result
    grouped: Any = GroupedLinear
    grouped.__init__ = _on_device(grouped.__init__)
    # Kernels in Triton write into tensors that Python has made
    triton.runtime.jit.KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None


def _on_device(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` that a device's number doesn't lead to the meta device, where no value would be made."""

    @wraps(initialize)
    def function(self: Any, *args: Any, device: Any = "cuda", **kwargs: Any) -> None:
        initialize(self, *args, device="cuda" if isinstance(device, int) else device, **kwargs)

    return function


def _importers() -> list[ModuleType]:
    starts = ("transformer_engine.", "megatron.core.", "cloudai_mbridge.")
    return [each for name, each in list(sys.modules.items()) if name.startswith(starts) and each is not None]


def _functions() -> dict[str, Callable[..., Any]]:
    """Return name in the extension -> function. One that has none here tells its name if it is given tensors."""
    own = {name: each for name, each in globals().items() if inspect.isfunction(each) and not name.startswith("_")}
    made = own | _MACHINE | dict.fromkeys(_WITHOUT_RESULT, _without_result)
    for name in _ACTIVATIONS:
        made |= {name: _activation, f"d{name}": _activation_grad, f"dbias_d{name}": _activation_and_bias_grad}
    for name in _GATED:
        made |= {name: _gated, f"d{name}": _activation_grad}
    made |= {"clamped_swiglu": _gated, "clamped_dswiglu": _activation_grad}
    for name in ("swiglu", "srelu", "situglu", "clamped_swiglu"):
        width = 1 if name == "srelu" else 2
        made[f"scaled_{name}"] = partial(_scaled, width)
        made[f"scaled_{name.replace('swiglu', 'dswiglu') if 'swi' in name else 'd' + name}"] = _scaled_grad
    for mask in ("", "_masked", "_upper_triang_masked", "_aligned_causal_masked"):
        made |= {f"scaled{mask}_softmax_{way}": _like_first for way in ("forward", "backward")}
    for name, value in vars(tex).items():
        if inspect.isbuiltin(value) and name not in made:
            is_in_place = name.startswith("multi_tensor_")
            made[name] = _without_result if is_in_place else partial(_unknown, name, value)
    return made


def _without_result(*args: Any, **kwargs: Any) -> None:
    """Stand for a function that writes values alone."""


def _unknown(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(each, (torch.Tensor, QuantizedTensorStorage)) for each in (*args, *kwargs.values())):
        raise NotImplementedError(f"the shapes that Transformer Engine's {name} returns are not known to a rehearsal")
    return original(*args, **kwargs)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=_META)


def _dtype(of: Any) -> torch.dtype:
    """Return the dtype of a type of Transformer Engine or of torch."""
    return of if isinstance(of, torch.dtype) else _TYPES[of.name]


def _stored(shape: Sequence[int], dtype: torch.dtype, quantizer: Any, output: Any = None) -> Any:
    """Return what a kernel with this quantizer returns."""
    if output is not None:
        return output if quantizer is None else _with_buffers(quantizer, output)
    return _empty(shape, dtype) if quantizer is None else _quantized(quantizer, torch.Size(shape), dtype)


def _like_first(first: torch.Tensor, *others: Any) -> torch.Tensor:
    return _empty(first.shape, first.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Number formats


def _specification(quantizer: Any, shape: torch.Size) -> tuple[Any, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    kind = Float8CurrentScalingQuantizer if isinstance(quantizer, Float8Quantizer) else type(quantizer)
    made = kind.inner_tensor_specs(quantizer, tuple(shape))
    if isinstance(quantizer, NVFP4Quantizer) and "_columnwise_data" in made:  # the extension's is a matrix
        made["_columnwise_data"] = ((shape[-1], shape[:-1].numel() // 2), torch.uint8)
    return kind, made


def _quantized(quantizer: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    kind, specification = _specification(quantizer, shape)
    metadata = kind.storage_metadata(quantizer, dtype)
    context = {
        "cls": metadata["cls"],
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        "nontensor_kwargs": metadata["nontensor_kwargs"],
    }
    tensors = {name: _empty(size, of) for name, (size, of) in specification.items()}
    return QuantizedTensorStorage.__tensor_unflatten__(tensors, context, shape, _empty(shape, dtype).stride())


def _with_buffers(quantizer: Any, output: Any) -> Any:
    """Give a quantized tensor the buffers that the quantizer's usages need, and take the others away."""
    if not isinstance(output, QuantizedTensorStorage):
        return output
    _, specification = _specification(quantizer, output.size())
    for name, _ in type(output)._INNER_TENSORS:
        if name not in specification:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            setattr(output, name, _empty(*specification[name]))
    if isinstance(output, Float8TensorStorage):
        output._transpose_invalid = output._transpose is None
    return output


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return a quantized tensor."""
    return _quantized(quantizer, torch.Size(shape), dtype)


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Maybe = None) -> Any:
    """Return the tensor in the quantizer's format, written to `output` if given."""
    return _stored(tensor.shape, tensor.dtype, quantizer, output)


def split_quantize(
    tensor: torch.Tensor, split_sections: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Return the parts of a tensor along its first dimension, each quantized."""
    parts = torch.split(tensor, split_sections)
    return [quantize(part, each) for part, each in zip(parts, quantizers, strict=True)]


def multi_tensor_quantize(tensors: list[torch.Tensor], quantizers: list[Any]) -> list[Any]:
    """Return each tensor quantized."""
    return [quantize(tensor, each) for tensor, each in zip(tensors, quantizers, strict=True)]


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the gradient in the quantizer's format."""
    return [_empty(input.shape[-1:], input.dtype), _stored(input.shape, input.dtype, quantizer)]


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """Return a quantized tensor in high precision."""
    return _empty(input.size(), _dtype(otype))


def _dequantized(context: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    return _empty(tensor.size(), dtype)


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: Maybe) -> torch.Tensor:
    """Return the bytes with the last dimension first."""
    return _empty((input.shape[-1], *input.shape[:-1]), input.dtype) if out is None else out


def group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Maybe, tensor_offsets: Maybe = None
) -> Any:
    """Return the parts of a tensor along its first dimension in the quantizer's format, in one storage."""
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    make = GroupedTensorStorage.make_grouped_tensor
    return make(num_tensors, first_dims, None, rows, columns, quantizer, _META, tensor.dtype)


def bgrad_group_quantize(
    tensor: torch.Tensor, quantizer: Any, num_tensors: int, first_dims: Maybe, tensor_offsets: Maybe = None
) -> tuple[Any, torch.Tensor]:
    """Return what `group_quantize` returns, and the gradients of the biases."""
    biases = _empty((num_tensors, tensor.shape[-1]), tensor.dtype)
    return group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets), biases


def splits_to_offsets_multi(
    split_sizes: Any, device: Any, strides: list[int], include_leading_zero: list[bool], dtypes: list[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Return the sizes of the parts on the GPU, and where they start, in elements, for each stride."""
    count = len(split_sizes)
    made = zip(include_leading_zero, dtypes, strict=True)
    return split_sizes, [_empty((count + has_zero,), dtype) for has_zero, dtype in made]


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Maybe,
    bias_type: Any,
    gelu: bool,
    gelu_in: Maybe,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> list[Any]:
    """Return op(B) op(A), the gradient of the bias, the input of GELU, and None."""
    if overlap.get("comm_overlap") is not None:
        raise NotImplementedError("products that overlap their communication are not known to a rehearsal")
    dtype = A.dtype if output_dtype is None else _dtype(output_dtype)
    shape = _product(A, transA, B, transB)
    bias_grad = _empty(B.size()[-1:], dtype) if bias is not None and grad else None
    pre_gelu = _empty(shape, dtype) if gelu and not grad else None
    return [_stored(shape, dtype, quantizer, D), bias_grad, pre_gelu, None]


def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    *others: Any,
) -> Sequence[torch.Tensor]:
    """Write the products of all pairs to D; return the biases."""
    for a, b in zip(A, B, strict=True):
        _product(a, transA, b, transB)
    return bias


def te_general_grouped_gemm_for_grouped_tensor(
    A: Any, transA: bool, B: Any, transB: bool, out: Any, *others: Any
) -> Any:
    """Write the products of all pairs of two grouped tensors, or of a list of weights and one, to `out`."""
    rows = B.logical_shape[0]
    if isinstance(A, (list, tuple)):
        weight = math.prod(A[0].size())
    elif isinstance(out, (list, tuple)):
        weight = math.prod(out[0].size())
    else:
        weight = math.prod(A.logical_shape) // A.num_tensors
    _NOTE[0](2 * rows * weight)
    return out


te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor


def _product(A: Any, transA: bool, B: Any, transB: bool) -> tuple[int, ...]:
    """Return the shape of a product, and note its FLOPs."""
    a, b = tuple(A.size()), tuple(B.size())
    columns = math.prod(a[:-1]) if transA else a[-1]
    leading, inner = ((b[-1],), math.prod(b[:-1])) if transB else (b[:-1], b[-1])
    _NOTE[0](2 * math.prod(leading) * columns * inner)
    return (*leading, columns)


# ---------------------------------------------------------------------------------------------------------------------
# Normalization and activations


def layernorm_fwd(
    input: Any, weight: torch.Tensor, bias: Maybe, eps: float, ln_out: Any, quantizer: Any, otype: Any, *others: Any
) -> list[Any]:
    """Return the normalized rows, in the quantizer's format, with the mean and the inverse deviation of each."""
    rows = tuple(input.size())[:-1]
    made = _stored(input.size(), _dtype(otype), quantizer, ln_out)
    return [made, *(_empty((math.prod(rows),), torch.float32) for _ in range(2))]


def rmsnorm_fwd(
    input: Any, weight: torch.Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, *others: Any
) -> list[Any]:
    """Return the normalized rows, in the quantizer's format, None, and the inverse root mean square of each."""
    made, _, inverse = layernorm_fwd(input, weight, None, eps, ln_out, quantizer, otype)
    return [made, None, inverse]


def layernorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, *others: Any
) -> list[torch.Tensor]:
    """Return the gradients of the input, gamma and beta."""
    return [_empty(x.shape, x.dtype), *(_empty(gamma.shape, gamma.dtype) for _ in range(2))]


def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, *others: Any
) -> list[torch.Tensor]:
    """Return the gradients of the input and gamma."""
    return [_empty(x.shape, x.dtype), _empty(gamma.shape, gamma.dtype)]


def rmsnorm_bwd_add(
    dz: torch.Tensor, x: torch.Tensor, add: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, *others: Any
) -> list[torch.Tensor]:
    """Return the gradient of the input plus `add`, and that of gamma."""
    return rmsnorm_bwd(dz, x, rsigma, gamma)


def _activation(input: torch.Tensor, quantizer: Any, *others: Any) -> Any:
    return _stored(input.shape, input.dtype, quantizer)


def _gated(input: torch.Tensor, quantizer: Any, *others: Any, **options: Any) -> Any:
    return _stored((*input.shape[:-1], input.shape[-1] // 2), input.dtype, quantizer)


def _activation_grad(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *others: Any, **options: Any) -> Any:
    return _stored(fwd_input.shape, fwd_input.dtype, quantizer)


def _activation_and_bias_grad(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
    return [_empty(fwd_input.shape[-1:], fwd_input.dtype), _activation_grad(grad, fwd_input, quantizer)]


def _scaled(width: int, input: torch.Tensor, scales: torch.Tensor, quantizer: Any, *others: Any) -> Any:
    return _stored((*input.shape[:-1], input.shape[-1] // width), input.dtype, quantizer)


def _scaled_grad(
    grad: torch.Tensor, fwd_input: torch.Tensor, scales: torch.Tensor, quantizer: Any, *others: Any
) -> tuple[Any, torch.Tensor]:
    return _stored(fwd_input.shape, fwd_input.dtype, quantizer), _empty(scales.shape, scales.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def get_fused_attn_backend(parameters: Any) -> tuple[Any, str]:
    """Return cuDNN's attention, which the GPUs of the recipes have in 16 and in 8 bits."""
    is_8_bit = parameters.qkv_dtype.name.startswith("kFloat8")
    backends = tex.NVTE_Fused_Attn_Backend
    return backends.NVTE_FP8 if is_8_bit else backends.NVTE_F16_arbitrary_seqlen, ""


def _sizes(layout: Any, tensor: Any) -> dict[str, int]:
    """Return the sizes of a query or key by the letter of its dimension in a layout: t or b and s, h, d."""
    letters = layout.name.split("_")[1].lower().replace("2", "").replace("3", "")
    return dict(zip(letters, tensor.size(), strict=True))


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: Any,
    k: Any,
    v: Any,
    fake_dtype: torch.dtype,
    *others: Any,
) -> list[Any]:
    """Return the output, the sums of the softmax, and the state of the random numbers."""
    o_quantizer, attn_bias, softmax_offset = others[5:8]
    sizes = _sizes(qkv_layout, q) | {"d": v.size()[-1]}
    out = _stored([sizes[each] for each in o_format.name.split("_")[1].lower()], fake_dtype, o_quantizer)
    _NOTE[0](_attention_flops(sizes, q, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size[0]))
    is_packed = "t" in sizes
    sums = (sizes["t"], sizes["h"], 1) if is_packed else (sizes["b"], sizes["h"], max_seqlen_q, 1)
    aux = [each for each in (attn_bias, softmax_offset) if each is not None]
    return [out, _empty(sums, torch.float32), _empty((2,), torch.int64), *aux]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    d_o: Any,
    fake_dtype: torch.dtype,
    *others: Any,
) -> list[Any]:
    """Return the gradients of query, key and value, of a bias, and of the softmax's offset."""
    sizes = _sizes(qkv_layout, q) | {"d": v.size()[-1]}
    _NOTE[0](2 * _attention_flops(sizes, q, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size[0]))
    quantizer, form = others[5], dqkv_layout.name.split("_")[1].lower()
    made = []
    for each in (q, k, v):
        own = _sizes(qkv_layout, each)
        made.append(_stored([own[letter] for letter in form if letter in own], fake_dtype, quantizer))
    has_offset = softmax_type.name == "NVTE_LEARNABLE_SOFTMAX"
    return [*made, None, _empty((1, sizes["h"], 1, 1), torch.float32) if has_offset else None]


def _attention_flops(sizes: dict[str, int], query: Any, length: int, keys: int, mask: Any, window: int) -> int:
    """Return the FLOPs of both products; of a causal mask half of the pairs, as Megatron-Core's formula counts them.

    window: keys before a query that it sees, -1 for all.
    """
    batch = sizes["b"] if "b" in sizes else sizes["t"] // length
    pairs = length * keys
    if "CAUSAL" in mask.name:
        pairs = (window + 1) * length - (window + 1) * window // 2 if 0 <= window < keys else pairs // 2
    return int(2 * batch * sizes["h"] * pairs * (query.size()[-1] + sizes["d"]))


def fused_rope_forward(input: torch.Tensor, *rope: Any) -> torch.Tensor:
    """Return the input rotated."""
    return _empty(input.shape, input.dtype)


fused_rope_backward = fused_rope_forward


def fused_qkv_rope_forward(
    qkv: torch.Tensor, q_freqs: Any, k_freqs: Any, start_positions: Any, splits: list[int], *others: Any
) -> list[torch.Tensor]:
    """Return query, key and value [s, b, heads, dimension] of an input [s, b, groups, all dimensions of a group]."""
    query, key, value = splits
    length, batch, groups, _ = qkv.shape
    return [_empty((length, batch, groups * query // key, key), qkv.dtype)] + [
        _empty((length, batch, groups, each), qkv.dtype) for each in (key, value)
    ]


def fused_qkv_rope_backward(
    q_grad: torch.Tensor, k_grad: torch.Tensor, v_grad: torch.Tensor, q_freqs: Any, k_freqs: Any, splits: list[int],
    *others: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the input of `fused_qkv_rope_forward`."""
    return _empty((*k_grad.shape[:2], k_grad.shape[2], sum(splits)), q_grad.dtype)


def multi_tensor_transpose_to_bhsd(
    tensors: list[Maybe], original_format: str, outputs: list[Maybe] | None = None
) -> list[Maybe]:
    """Return tensors [s, b, h, d] or [b, s, h, d] as [b, h, s, d]."""
    if outputs is not None:
        return outputs
    at = [original_format.index(each) for each in "bhsd"]
    return [None if each is None else _empty([each.shape[i] for i in at], each.dtype) for each in tensors]


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """Return a half of each sequence of a pack."""
    return _empty((tensor.shape[0] // 2, *tensor.shape[1:]), tensor.dtype)


def thd_read_second_half_lse(lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, tokens: int) -> Any:
    """Return the second half of the sums of the softmax."""
    return _empty((*lse.shape[:-1], lse.shape[-1] // 2), lse.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def fused_topk_with_score_function_fwd(logits: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    """Return probabilities [tokens, experts], the routing map, and what the backward pass needs."""
    kinds = (logits.dtype, torch.bool, torch.float32)
    return tuple(_empty(logits.shape, each) for each in kinds)


def fused_score_for_moe_aux_loss_fwd(logits: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    """Return the normalized scores, the routing map without a bias, and what the backward pass needs."""
    return tuple(_empty(logits.shape, each) for each in (torch.float32, torch.bool, torch.float32))


def fused_moe_aux_loss_fwd(probs: torch.Tensor, *others: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the auxiliary loss and its factor."""
    return _empty((), probs.dtype), _empty((), torch.float32)


fused_moe_aux_loss_fwd_graph_safe = fused_moe_aux_loss_fwd


def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, grad_aux_loss: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the probabilities."""
    return _empty((num_rows, num_cols), grad_aux_loss.dtype)


def swap_first_dims(tensor: torch.Tensor, out: Maybe = None) -> torch.Tensor:
    """Return the tensor with its first two dimensions swapped."""
    return _empty((tensor.shape[1], tensor.shape[0], *tensor.shape[2:]), tensor.dtype) if out is None else out


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, and those of each."""
    return _empty((1,), torch.float32), _empty((len(tensor_lists[0]) if per_tensor else 0,), torch.float32)
