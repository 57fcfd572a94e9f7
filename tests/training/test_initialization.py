"""The weights that a model starts with, and what Transformer Engine keeps beside those in FP8."""

from types import MethodType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.models import initialization  # noqa: E402

CONFIG = SimpleNamespace(
    gated_linear_unit=False, init_method_std=0.02, num_layers=2, use_cpu_initialization=True, num_moe_experts=None
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("world_size", 1), ("rank", 0)):
        monkeypatch.setattr(initialization.mpu, f"get_tensor_model_parallel_{name}", lambda value=value: value)


def model(kept: "torch.Tensor | None") -> "torch.nn.Linear":
    """Return a model whose weight keeps the values of high precision that it was made with, as one in FP8 does."""
    made = torch.nn.Linear(8, 4)
    made.weight._kept = kept
    made.weight.get_high_precision_init_val = MethodType(lambda self: self._kept, made.weight)
    return made


def test_the_optimizer_starts_from_the_same_weights() -> None:
    made = model(torch.ones(4, 8, dtype=torch.bfloat16))
    initialization.initialize_weights(made, CONFIG, seed=1)
    kept = made.weight.get_high_precision_init_val()
    assert kept.dtype is torch.bfloat16
    assert torch.equal(kept, made.weight.detach().bfloat16())
    assert 0.01 < made.weight.std() < 0.04


def test_values_that_are_not_kept_any_more() -> None:
    made = model(None)
    initialization.initialize_weights(made, CONFIG, seed=1)
    assert 0.01 < made.weight.std() < 0.04


def test_mup_scales_hidden_matrices_by_the_root_of_the_width() -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "use_mup": True, "mup_width_mult": 4.0})
    plain, scaled = (torch.nn.Sequential(torch.nn.Linear(8, 4)) for _ in range(2))
    initialization.initialize_weights(plain, CONFIG, seed=1)
    initialization.initialize_weights(scaled, config, seed=1)
    assert torch.allclose(scaled[0].weight * 2, plain[0].weight)
    for each, settings in ((plain, CONFIG), (scaled, config)):
        each.embedding = torch.nn.Embedding(8, 4)
        initialization.initialize_weights(each, settings, seed=1)
    assert torch.equal(plain.embedding.weight, scaled.embedding.weight)
