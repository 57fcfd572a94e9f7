"""Emulation of Transformer Engine's quantizers: delayed and current scaling, FP8 in blocks, MXFP8, NVFP4.

Block scales stay in rows and columns where a GPU's are swizzled for its matrix product: only the mark is as on a GPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from tests.transformer_engine.emulation import formats
from tests.transformer_engine.emulation.formats import MAX, block_amax, from_fp8, scale_of, spread, to_fp8

ROUNDING = torch.Generator()  # of NVFP4's gradients
FP4_STEPS = 6.0 * 448.0  # the largest value of e2m1 times that of its scales


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Return the tensor in the quantizer's format, written to `output` if given; nothing is written if noop is set."""
    output = _empty(quantizer, tensor.shape, tensor.dtype) if output is None else _with_buffers(quantizer, output)
    if tensor.numel() and (noop is None or not noop.item()):
        _write(quantizer, tensor.detach().float(), output)
    return output


def store(value: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """Return what a kernel with this quantizer returns: the value itself without one."""
    if quantizer is not None:
        return quantize(value, quantizer, output)
    return value if output is None else output.copy_(value)


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return a quantized tensor without values."""
    return _empty(quantizer, torch.Size(shape), dtype)


def split_quantize(
    tensor: torch.Tensor, split_sections: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Return the parts of a tensor along its first dimension, each quantized."""
    return [quantize(part, each) for part, each in zip(tensor.split(split_sections), quantizers, strict=True)]


def multi_tensor_quantize(tensors: list[torch.Tensor], quantizers: list[Any]) -> list[Any]:
    """Return each tensor quantized."""
    return [quantize(tensor, each) for tensor, each in zip(tensors, quantizers, strict=True)]


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """Return the values of a quantized tensor."""
    return dequantize_for_autograd(None, input, formats.torch_dtype(otype))


def dequantize_for_autograd(context: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a quantized tensor: the forward pass of Transformer Engine's function."""
    return read(tensor, _is_columnwise_only(tensor)).reshape(tensor.size()).to(dtype)


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
    """Return the bytes with the last dimension first."""
    moved = input.movedim(-1, 0).contiguous()
    return moved if out is None else out.copy_(moved)


def read(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the values in fp32 as a matrix, from the data meant for this direction of a matrix product.

    AssertionError: the tensor lacks that data, on which a GPU would fail, too.
    """
    if isinstance(tensor, Float8TensorStorage):
        return _read_float8(tensor, columnwise)
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scales = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    assert data is not None, f"{type(tensor).__name__} without {'columnwise' if columnwise else 'rowwise'} data"
    if isinstance(tensor, Float8BlockwiseQTensorStorage):
        return _read_blockwise(tensor, data, scales, columnwise)
    if isinstance(tensor, MXFP8TensorStorage):
        matrix = from_fp8(data, tensor._fp8_dtype).flatten(0, -2)
        block = (32, 1) if columnwise else (1, 32)
        return matrix * spread(formats.decode_e8m0(scales), *block, matrix.shape)
    assert isinstance(tensor, NVFP4TensorStorage), type(tensor)
    values = formats.from_fp4(data).flatten(1) if columnwise else formats.from_fp4(data).flatten(0, -2)
    amax = tensor._amax_columnwise if columnwise else tensor._amax_rowwise
    matrix = values * spread(scales.view(torch.float8_e4m3fn).float(), 1, 16, values.shape) * (amax / FP4_STEPS)
    return matrix.T if columnwise else matrix


def _read_float8(tensor: Any, columnwise: bool) -> torch.Tensor:
    has_transpose = tensor._transpose is not None and not tensor._transpose_invalid
    if columnwise and not _any_layout():
        assert has_transpose, "Float8Tensor without its transpose"
    takes_transpose = (columnwise and has_transpose) or tensor._data is None
    data = tensor._transpose.movedim(0, -1) if takes_transpose else tensor._data
    return (from_fp8(data.contiguous(), tensor._fp8_dtype) * tensor._scale_inv).flatten(0, -2)


def _read_blockwise(tensor: Any, data: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> torch.Tensor:
    values = from_fp8(data, tensor._fp8_dtype)
    matrix = values.flatten(1) if columnwise else values.flatten(0, -2)
    if tensor._is_2D_scaled:
        matrix = matrix * spread(scales, 128, 128, matrix.shape)
    else:
        matrix = matrix * spread(scales.T, 1, 128, matrix.shape)
    return matrix.T if columnwise else matrix


def _write(quantizer: Any, values: torch.Tensor, output: Any) -> None:
    matrix = values.reshape(-1, values.shape[-1])
    if isinstance(quantizer, Float8Quantizer):
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, values.abs().max()))
        _write_float8(output, values, quantizer.scale, quantizer)
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        amax = _reduced(values.abs().max().view(1), quantizer)
        scale = scale_of(amax, MAX[quantizer.dtype.name], quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        _write_float8(output, values, scale, quantizer)
    elif isinstance(quantizer, Float8BlockQuantizer):
        if output._rowwise_data is not None:
            _write_blocks(quantizer, matrix, output._rowwise_data, output._rowwise_scale_inv)
        if output._columnwise_data is not None:
            _write_blocks(quantizer, matrix.T, output._columnwise_data, output._columnwise_scale_inv)
    elif isinstance(quantizer, MXFP8Quantizer):
        _write_mxfp8(quantizer, matrix, output)
    else:
        assert isinstance(quantizer, NVFP4Quantizer), type(quantizer)
        _write_nvfp4(quantizer, matrix, output)


def _write_float8(output: Any, values: torch.Tensor, scale: torch.Tensor, quantizer: Any) -> None:
    data = to_fp8(values * scale, quantizer.dtype)
    output._scale_inv.copy_(scale.reciprocal())
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(data.movedim(-1, 0))


def _write_blocks(quantizer: Any, matrix: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor) -> None:
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    amax = block_amax(matrix, rows, 128)
    scale = scale_of(amax, MAX[quantizer.dtype.name], quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data.copy_(to_fp8(matrix * spread(scale, rows, 128, matrix.shape), quantizer.dtype).view(data.shape))
    inverse = scale.reciprocal() if rows == 128 else scale.reciprocal().T
    scale_inv.zero_()
    scale_inv[: inverse.shape[0], : inverse.shape[1]].copy_(inverse)


def _write_mxfp8(quantizer: Any, matrix: torch.Tensor, output: Any) -> None:
    for side, block in (("rowwise", (1, 32)), ("columnwise", (32, 1))):
        data, scale_inv = getattr(output, f"_{side}_data"), getattr(output, f"_{side}_scale_inv")
        if data is None:
            continue
        amax = block_amax(matrix, *((32, 32) if quantizer.with_2d_quantization else block))
        if quantizer.with_2d_quantization:
            amax = amax.repeat_interleave(32 // block[0], 0).repeat_interleave(32 // block[1], 1)
        exponents = formats.encode_e8m0(amax / MAX[quantizer.dtype.name])
        scaled = matrix / spread(formats.decode_e8m0(exponents), *block, matrix.shape)
        data.copy_(to_fp8(scaled, quantizer.dtype).view(data.shape))
        scale_inv.zero_()
        scale_inv[: exponents.shape[0], : exponents.shape[1]].copy_(exponents)


def _write_nvfp4(quantizer: Any, matrix: torch.Tensor, output: Any) -> None:
    assert not quantizer.row_scaled_nvfp4, "not emulated"
    assert not quantizer.nvfp4_use_4over6, "not emulated"
    sides = {"rowwise": matrix, "columnwise": matrix.T}
    if quantizer.with_rht:  # along the dimension that the product for weight gradients sums over
        turned = matrix.T.reshape(-1, 16).bfloat16() @ quantizer.rht_matrix
        sides["columnwise"] = turned.float().view(matrix.T.shape)
    for side, values in sides.items():
        if (data := getattr(output, f"_{side}_data")) is None:
            continue
        amax = _reduced(values.abs().max().view(1), quantizer)
        getattr(output, f"_amax_{side}").copy_(amax)
        rows = 16 if quantizer.with_2d_quantization else 1
        blocks = block_amax(values, rows, 16).repeat_interleave(rows, 0)
        packed, scales = nvfp4(values, blocks, amax, ROUNDING if quantizer.stochastic_rounding else None)
        data.copy_(packed.view(data.shape))
        scale_inv = getattr(output, f"_{side}_scale_inv")
        scale_inv.zero_()
        scale_inv[: scales.shape[0], : scales.shape[1]].copy_(scales.view(torch.uint8))


def nvfp4(
    values: torch.Tensor, amax: torch.Tensor, whole: torch.Tensor, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed e2m1 and the e4m3 scales of its blocks; amax: of 16 columns of each row, whole: of all values."""
    encode = torch.where(whole > 0, FP4_STEPS / whole, 1.0).clamp(max=torch.finfo(torch.float32).max)
    scales = (amax * (encode / 6.0)).clamp(max=448.0).to(torch.float8_e4m3fn)
    factors = (1.0 / (scales.float() / encode)).clamp(max=torch.finfo(torch.float32).max)
    return formats.to_fp4(values * spread(factors, 1, 16, values.shape), generator), scales


def _reduced(amax: torch.Tensor, quantizer: Any) -> torch.Tensor:
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return amax


def _any_layout() -> bool:
    """Return whether the pretended GPU multiplies FP8 matrices in every layout, so that no transpose is kept."""
    return torch.cuda.get_device_capability()[0] >= 10


def _specification(quantizer: Any, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    kind = Float8CurrentScalingQuantizer if isinstance(quantizer, Float8Quantizer) else type(quantizer)
    made = kind.inner_tensor_specs(quantizer, tuple(shape))
    if isinstance(quantizer, NVFP4Quantizer) and "_columnwise_data" in made:  # the extension's is a matrix
        made["_columnwise_data"] = ((shape[-1], shape[:-1].numel() // 2), torch.uint8)
    return made


def _empty(quantizer: Any, shape: torch.Size, dtype: torch.dtype) -> Any:
    kind = Float8CurrentScalingQuantizer if isinstance(quantizer, Float8Quantizer) else type(quantizer)
    metadata = kind.storage_metadata(quantizer, dtype)
    specification = _specification(quantizer, shape)
    tensors = {name: torch.zeros(size, dtype=kind_) for name, (size, kind_) in specification.items()}
    context = {
        "cls": metadata["cls"],
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        "nontensor_kwargs": metadata["nontensor_kwargs"],
    }
    stride = torch.empty(shape, device="meta").stride()
    return QuantizedTensorStorage.__tensor_unflatten__(tensors, context, shape, stride)


def _with_buffers(quantizer: Any, output: Any) -> Any:
    """Give a quantized tensor the buffers that the quantizer's usages need, and take the others away."""
    specification = _specification(quantizer, output.size())
    for name, _ in type(output)._INNER_TENSORS:
        if name not in specification:
            setattr(output, name, None)
        elif getattr(output, name) is None:
            size, dtype = specification[name]
            setattr(output, name, torch.zeros(size, dtype=dtype))
    if isinstance(output, Float8TensorStorage):
        output._transpose_invalid = output._transpose is None
    return output


def _is_columnwise_only(tensor: Any) -> bool:
    rowwise = tensor._data if isinstance(tensor, Float8TensorStorage) else tensor._rowwise_data
    return rowwise is None
