"""Emulation of Transformer Engine's matrix products: quantized inputs are read back, the product is in fp32."""
# ruff: noqa: N803

from collections.abc import Sequence
from typing import Any

import torch

from tests.transformer_engine.emulation.activations import PLAIN
from tests.transformer_engine.emulation.formats import torch_dtype
from tests.transformer_engine.emulation.quantize import read, store

Maybe = torch.Tensor | None


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
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Maybe = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return op(B) op(A) with its epilogue, the gradient of the bias, the input of GELU, and None."""
    assert comm_overlap is None, "not emulated"
    dtype = A.dtype if output_dtype is None else torch_dtype(output_dtype)
    product = alpha * _multiply(A, transA, B, transB)
    bias_grad = pre_gelu = None
    if bias is not None and grad:
        bias_grad = _matrix(B, not transB).sum(0).to(dtype)
    elif bias is not None:
        product = product + bias.float()
    if gelu and grad:
        assert gelu_in is not None
        with torch.enable_grad():
            leaf = gelu_in.detach().float().requires_grad_()
            (product,) = torch.autograd.grad(PLAIN["gelu"](leaf), leaf, product.reshape(leaf.shape))
    elif gelu:
        pre_gelu = product.to(dtype)
        product = PLAIN["gelu"](product)
    if accumulate:
        product = product.reshape(D.shape) + (1.0 if beta is None else beta) * D.float()
    if D is not None and quantizer is None:
        return [D.copy_(product.reshape(D.shape)), bias_grad, pre_gelu, None]
    return [store(product.to(dtype), quantizer, D), bias_grad, pre_gelu, None]


def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """Write the products of all pairs to D, one after the other in a single output, and gradients of biases."""
    assert D is not None
    assert not any(each.numel() for each in pre_gelu_out), "not emulated"
    rows = [_rows(each, transB) for each in B]
    outputs = D[0].view(-1, D[0].shape[-1])[: sum(rows)].split(rows) if single_output else D
    for a, b, out, each in zip(A, B, outputs, bias, strict=True):
        product = _multiply(a, transA, b, transB) if b.size().numel() else torch.zeros(out.shape)
        if each.numel() and grad:
            each.copy_(_matrix(b, not transB).sum(0) if b.size().numel() else 0)
        elif each.numel():
            product = product + each.float()
        out.copy_(product.reshape(out.shape) + (out.float() if accumulate else 0))
    return bias


def _rows(tensor: Any, is_transposed: bool) -> int:
    *leading, last = tensor.size()
    return last if is_transposed else torch.Size(leading).numel()


def _multiply(A: Any, transA: bool, B: Any, transB: bool) -> torch.Tensor:
    left, right = _matrix(B, not transB), _matrix(A, transA)
    left, right = left.T if transB else left, right.T if transA else right
    leading = () if transB else B.size()[:-1]
    product = left @ right
    return product.view(*leading, product.shape[-1]) if leading else product


def _matrix(tensor: Any, is_rowwise: bool) -> torch.Tensor:
    if hasattr(tensor, "_quantizer"):
        return read(tensor, not is_rowwise)
    return tensor.float().reshape(-1, tensor.shape[-1])
