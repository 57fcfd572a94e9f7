"""Scans of state-space layers without values: shapes, gradients, and what is kept for the backward pass."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from cloudai_mbridge.training.dry import scans
from tests.cases import every

BATCH, LENGTH, HEADS, SIZE, STATE = 2, 128, 4, 16, 32
INNER = HEADS * SIZE


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def kept_by(call: Any) -> tuple[torch.Tensor, int]:
    """Return a call's first result and the bytes that it keeps for the backward pass."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = call()
    return (result[0] if isinstance(result, tuple) else result), sum(sizes)


SPLIT = meta(BATCH, LENGTH, 2 * INNER + 2 * STATE + HEADS)
SEQUENCES, CHANNELS = meta(BATCH, LENGTH, INNER), meta(BATCH, INNER, LENGTH)
PER_HEAD, PER_GROUP = meta(BATCH, LENGTH, HEADS, SIZE), meta(BATCH, LENGTH, 1, STATE)
STEPS, OF_HEADS = meta(BATCH, LENGTH, HEADS), meta(HEADS, dtype=torch.float32)
WEIGHT, BIAS = meta(INNER, 4), meta(INNER)
KEYS = meta(BATCH, LENGTH, HEADS, STATE)


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@every(
    ("name", "operands", "options", "like", "more"),
    [
        (
            "mamba_split_conv1d_scan_combined",
            (SPLIT, meta(INNER + 2 * STATE, 4), None, OF_HEADS, OF_HEADS, OF_HEADS),
            {"chunk_size": 64, "headdim": SIZE, "ngroups": 1, "activation": "silu"},
            SEQUENCES,
            nbytes(SEQUENCES),  # the output before its gate
        ),
        (
            "mamba_chunk_scan_combined",
            (PER_HEAD, STEPS, OF_HEADS, PER_GROUP, PER_GROUP),
            {"chunk_size": 64, "D": OF_HEADS, "z": PER_HEAD, "dt_bias": OF_HEADS, "dt_softplus": True},
            PER_HEAD,
            nbytes(PER_HEAD, PER_HEAD, OF_HEADS, OF_HEADS) + 2 * nbytes(STEPS),
        ),
        ("causal_conv1d_fn", (CHANNELS, WEIGHT, BIAS), {"activation": "silu", "seq_idx": None}, CHANNELS, 0),
        ("causal_conv1d", (SEQUENCES, WEIGHT, BIAS), {"activation": "silu", "cu_seqlens": None}, SEQUENCES, 0),
        ("l2norm", (KEYS,), {}, KEYS, nbytes(KEYS) // STATE * 2),
        (
            "chunk_gated_delta_rule",
            (KEYS, KEYS, PER_HEAD, STEPS, STEPS),
            {"initial_state": None, "output_final_state": False},
            PER_HEAD,
            nbytes(KEYS) // STATE * 64,
        ),
    ],
)
def test_a_kernel_keeps_its_operands_and_more(
    name: str, operands: tuple[Any, ...], options: dict[str, Any], like: torch.Tensor, more: int
) -> None:
    result, kept = kept_by(lambda: getattr(scans, name)(*operands, **options))
    given = [each for each in operands if each is not None]
    assert (result.shape, result.dtype, result.device.type) == (like.shape, like.dtype, "meta")
    assert kept == nbytes(*given) + more
    gradients = torch.autograd.grad(result, list(dict.fromkeys(given)), torch.empty_like(result))
    assert [each.shape for each in gradients] == [each.shape for each in dict.fromkeys(given)]


def test_only_what_is_there_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = ModuleType("megatron.core.ssm.a_layer")
    layer.causal_conv1d_fn, layer.l2norm, layer.other = len, None, len
    monkeypatch.setitem(sys.modules, layer.__name__, layer)
    scans.install()
    assert layer.causal_conv1d_fn is scans.causal_conv1d_fn
    assert (layer.l2norm, layer.other) == (None, len)
