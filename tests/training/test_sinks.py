"""Attention sinks on torch's attention, against the plain formula, and over layouts."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.models.attention import SDPACoreAttention  # noqa: E402
from tests.training.conftest import Train  # noqa: E402

LENGTH, HEADS, GROUPS, WIDTH = 6, 4, 2, 8


def _plain(q: Any, k: Any, v: Any, offset: Any) -> Any:
    """softmax over the causal keys and a logit `offset` of no key. q [s, b, heads, d] -> [s, b, heads * d]."""
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
    logits = (q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf)
    powers = logits.exp()
    weights = powers / (powers.sum(-1, keepdim=True) + offset.exp()[None, :, None, None])
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


@every("kind", ["vanilla", "off-by-one", "learnable"])
@every("window", [None, (LENGTH, 0)])
def test_the_formula(kind: str, window: Any) -> None:
    sizes = {"num_attention_heads": HEADS, "tensor_model_parallel_size": 1, "params_dtype": torch.float32}
    rest = {"attention_dropout": 0.0, "window_size": window, "window_attn_skip_freq": None, "sequence_parallel": False}
    config: Any = SimpleNamespace(softmax_type=kind, **sizes, **rest)
    attention = SDPACoreAttention(
        config, 1, None, "self", pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    )
    torch.manual_seed(1)
    query, key, value = (torch.randn(LENGTH, 2, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    offset = {"vanilla": torch.full((HEADS,), -torch.inf), "off-by-one": torch.zeros(HEADS)}.get(kind)
    if offset is None:
        offset = torch.randn(HEADS)
        attention.softmax_offset.data.copy_(offset)
    out = attention(query, key, value, None)
    assert torch.allclose(out, _plain(query, key, value, offset), atol=1e-6)
    if kind == "learnable":
        out.sum().backward()
        assert attention.softmax_offset.grad.abs().min() > 0


@pytest.mark.kept_ranks
@pytest.mark.process
@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_layouts_learn_the_same_sinks(train: Train, train_once: Train, layout: dict[str, int]) -> None:
    small = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 4}
    model = {**small, "num_query_groups": 2, "softmax_type": "learnable", "init_method_std": 0.3}
    steps = {"train_iters": 4, "exit_interval": 4, "global_batch_size": 4}
    sections = {"model": model, "train": steps, "optimizer": {"lr": 1e-2, "min_lr": 1e-2}}
    one = train_once(1, sections).losses
    checkpoint = {"save": "ckpt", "load": "ckpt"}
    split = {**sections, "model": {**model, **layout}, "checkpoint": checkpoint}
    first = train(2, {**split, "train": {**steps, "exit_interval": 2}}).losses
    assert first | train(2, split).losses == pytest.approx(one, abs=1e-5)
    vanilla = train_once(1, {**sections, "model": {**model, "softmax_type": "vanilla"}}).losses
    assert vanilla[4] != pytest.approx(one[4], abs=1e-4)
