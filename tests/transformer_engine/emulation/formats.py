"""Emulation of 8- and 4-bit number formats: rounding, packing, block scales. All arithmetic is in fp32."""

from typing import Any

import torch

# Largest value by the name of Transformer Engine's type
MAX = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0, "kFloat4E2M1": 6.0}
_FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_TYPES = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
_FLOAT_MAX = torch.finfo(torch.float32).max
# e2m1: magnitude by its three bits, and the boundaries between neighbours; ties go to the even one of two bits patterns
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_HALFWAY = (_E2M1[1:] + _E2M1[:-1]) / 2


def torch_dtype(te_dtype: Any) -> torch.dtype:
    """Return the dtype of a high-precision type of Transformer Engine."""
    return _TYPES[te_dtype.name]


def high_precision(tensor: Any) -> torch.Tensor:
    """Return a plain or quantized tensor in fp32."""
    return tensor.dequantize(dtype=torch.float32) if hasattr(tensor, "_quantizer") else tensor.float()


def to_fp8(values: torch.Tensor, te_dtype: Any) -> torch.Tensor:
    """Round scaled values to FP8, saturating; return the bytes."""
    largest = MAX[te_dtype.name]
    return values.float().clamp(-largest, largest).to(_FP8[te_dtype.name]).view(torch.uint8)


def from_fp8(data: torch.Tensor, te_dtype: Any) -> torch.Tensor:
    """Return the scaled values in fp32."""
    return data.view(_FP8[te_dtype.name]).float()


def to_fp4(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round scaled values to e2m1, two a byte, the first in the lower bits; with a generator stochastically."""
    size = values.abs().clamp(max=6.0)
    if generator is None:
        upper = torch.bucketize(size, _HALFWAY, right=True)
        lower = torch.bucketize(size, _HALFWAY)
        bits = torch.where(upper % 2 == 0, upper, lower)
    else:
        bits = torch.bucketize(size, _E2M1, right=True) - 1
        step = _E2M1[(bits + 1).clamp(max=7)] - _E2M1[bits]
        share = torch.where(step > 0, (size - _E2M1[bits]) / step.clamp(min=0.1), 0.0)
        bits = bits + (torch.rand(size.shape, generator=generator) < share)
    nibbles = (bits + 8 * (values < 0)).to(torch.uint8)
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def from_fp4(data: torch.Tensor) -> torch.Tensor:
    """Return the scaled values of packed e2m1 in fp32."""
    nibbles = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    return _E2M1[nibbles & 7] * (1 - 2 * (nibbles >> 3))


def scale_of(amax: torch.Tensor, largest: float, is_power_of_2: bool, epsilon: float) -> torch.Tensor:
    """Return the factor that maps `amax` to the largest value, 1 where there is none."""
    amax = amax.float().clamp(min=epsilon)
    scale = (largest / amax).clamp(max=_FLOAT_MAX)
    if is_power_of_2:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two; return its biased exponent."""
    bits = values.float().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & ((1 << 23) - 1)
    rounds_up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 1 << 22))
    return (exponent + rounds_up.int()).to(torch.uint8)


def decode_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the power of two."""
    return torch.exp2(exponents.float() - 127)


def block_amax(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest magnitude of each block of this size, the last ones of a dimension smaller."""
    pad = (-matrix.shape[1] % columns, -matrix.shape[0] % rows)
    padded = torch.nn.functional.pad(matrix.float().abs(), (0, pad[0], 0, pad[1]))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).amax((1, 3))


def spread(blocks: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    """Return a block's value at each of its elements."""
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
