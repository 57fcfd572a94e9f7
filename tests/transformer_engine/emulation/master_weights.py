"""Emulation of the kernels that write a shard of the master weights into quantized weights: in blocks, MXFP8, NVFP4.

A shard is a range of a flat matrix [rows, columns]. Amaxes are of the part of each block that the shard has; between
the two steps the ranks reduce them.
"""
# ruff: noqa: N803

from typing import Any

import torch
import transformer_engine_torch as tex

from tests.transformer_engine.emulation import formats
from tests.transformer_engine.emulation.formats import block_amax, from_fp4, spread, to_fp8
from tests.transformer_engine.emulation.quantize import FP4_STEPS, nvfp4


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amax of each square block [rows of blocks, columns of blocks]."""
    made = block_amax(_placed(tensor, h, w, start_offset), block_len, block_len)
    amax[: made.shape[0], : made.shape[1]].copy_(made)


def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """Write the shard's bytes."""
    factors = spread(scale, block_len, block_len, torch.Size((h, w))).flatten()
    out.copy_(to_fp8(inp.float().flatten() * factors[start_offset : start_offset + inp.numel()], out_dtype))


def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor, amax_rowwise: torch.Tensor, amax_colwise: torch.Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Write the amax of each 32 elements of a row and of a column."""
    matrix = _placed(input, rows, cols, start_offset)
    for amax, block in ((amax_rowwise, (1, 32)), (amax_colwise, (32, 1))):
        made = block_amax(matrix, *block)
        amax[: made.shape[0], : made.shape[1]].copy_(made)


def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Write the shard's bytes, by the scales of rows and by those of columns."""
    values = input.float().flatten()
    sides = ((output_rowwise, scale_inv_rowwise, (1, 32)), (output_colwise, scale_inv_colwise, (32, 1)))
    for output, scale_inv, block in sides:
        scales = spread(formats.decode_e8m0(scale_inv), *block, torch.Size((rows, cols))).flatten()
        output.copy_(to_fp8(values / scales[start_offset : start_offset + values.numel()], tex.DType.kFloat8E4M3))


def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: list[torch.Tensor],
    partial_amax_list: list[torch.Tensor],
    global_amax_list: list[torch.Tensor],
    h_list: list[int],
    w_list: list[int],
    start_offset_list: list[int],
    block_len: int = 16,
) -> None:
    """Write the amax of each square block, and of all."""
    shards = zip(
        master_weight_list, partial_amax_list, global_amax_list, h_list, w_list, start_offset_list, strict=True
    )
    for master, partial, whole, h, w, start in shards:
        partial.copy_(block_amax(_placed(master, h, w, start), block_len, block_len))
        whole.copy_(partial.max())


def nvfp4_compute_global_scale(global_amax: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Write the factor that maps the largest value to the largest e2m1 times the largest e4m3."""
    scale = (FP4_STEPS / global_amax).clamp(max=torch.finfo(torch.float32).max)
    global_scale.copy_(torch.where(global_amax > 0, scale, 1.0))


def nvfp4_multi_tensor_fused_scale(
    block_amax_list: list[torch.Tensor],
    global_amax_list: list[torch.Tensor],
    per_block_scale_list: list[torch.Tensor],
    target_scale_list: list[torch.Tensor],
    target_amax_list: list[torch.Tensor],
    tile_rows_list: list[int],
    tile_cols_list: list[int],
    rows_padded_list: list[int],
    block_len: int,
) -> None:
    """Write the blocks' scales to the weights, one for each row, and their amaxes."""
    weights = zip(
        block_amax_list, global_amax_list, per_block_scale_list, target_scale_list, target_amax_list, strict=True
    )
    for amax, whole, per_block, target, target_amax in weights:
        scales = nvfp4(torch.zeros(amax.shape[0], amax.shape[1] * block_len), amax, whole)[1]
        per_block.copy_(scales.float())
        target.zero_()
        by_row = scales.view(torch.uint8).repeat_interleave(block_len, 0)[: target.shape[0]]
        target[: by_row.shape[0], : by_row.shape[1]].copy_(by_row)
        target_amax.copy_(whole)


def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: list[torch.Tensor],
    out_list: list[torch.Tensor],
    scale_list: list[torch.Tensor],
    global_scale_list: list[torch.Tensor],
    h_list: list[int],
    w_list: list[int],
    start_offset_list: list[int],
    block_len: int = 16,
) -> None:
    """Write the shards, two values a byte; a shard starts and ends at a whole byte."""
    weights = zip(inp_list, out_list, scale_list, global_scale_list, h_list, w_list, start_offset_list, strict=True)
    for values, out, scale, whole, h, w, start in weights:
        assert start % 2 == values.numel() % 2 == 0, "not emulated"
        scales = spread(scale, block_len, block_len, torch.Size((h, w))).flatten()[start : start + values.numel()]
        factors = (1.0 / (scales / whole)).clamp(max=torch.finfo(torch.float32).max)
        out.copy_(formats.to_fp4(values.float().flatten() * factors))


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: list[torch.Tensor],
    columnwise_data_list: list[torch.Tensor],
    rowwise_scale_inv_list: list[torch.Tensor],
    columnwise_scale_inv_list: list[torch.Tensor],
    M_list: list[int],
    K_list: list[int],
) -> None:
    """Write the transposes of matrices with square blocks, and their scales."""
    weights = zip(
        rowwise_data_list,
        columnwise_data_list,
        rowwise_scale_inv_list,
        columnwise_scale_inv_list,
        M_list,
        K_list,
        strict=True,
    )
    for data, transposed, scales, turned, m, k in weights:
        transposed.copy_(formats.to_fp4(from_fp4(data).view(m, k).T))
        blocks = scales[:m:16, : -(-k // 16)].T  # [columns of blocks, rows of blocks]
        turned.zero_()
        by_row = blocks.repeat_interleave(16, 0)[: turned.shape[0]]
        turned[: by_row.shape[0], : by_row.shape[1]].copy_(by_row)


def _placed(shard: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    whole = torch.zeros(rows * columns)
    whole[start : start + shard.numel()] = shard.float().flatten()
    return whole.view(rows, columns)
