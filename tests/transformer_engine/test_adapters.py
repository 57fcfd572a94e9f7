"""Adapters of Transformer Engine's layers: where they are, how they are split, and what is saved."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.memory.adapter_parameters import adapters_per_stage
from cloudai_mbridge.estimate.memory.layout import Adapters, ParallelLayout
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.peft.adapter import SharedAdapter
from cloudai_mbridge.training.peft.config import CanonicalLoRA, DoRA, LoRA
from tests.transformer_engine.engine import MODEL, MODELS, Built, build, configure, gpu, torch

EP, TP = "expert_model_parallel_size", "tensor_model_parallel_size"
ETP, SP = "expert_tensor_parallel_size", "sequence_parallel"


def adapted(model: str, peft: Any, place: Path, world: int = 1, **layout: Any) -> Built:
    """Build the first of `world` ranks with adapters."""
    config = configure(model, **layout)
    config.peft, config.checkpoint.pretrained_checkpoint = peft, str(place)
    with gpu():
        return build(config, 0, world)


def shapes(built: Built) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what is saved of the adapters of the last layer, without its name."""
    found = {key: tuple(shape) for key, shape, _ in built.checkpoint if ".adapter." in key}
    return {key.partition(".layers.")[2].partition(".")[2].lstrip("1."): shape for key, shape in found.items()}


def predicted(adapters: Adapters, world: int) -> int:
    """Return what the estimate counts of adapters on a rank of the layout with grouped experts, or of no layout."""
    recipe = Recipe("grouped", "", "", "", {"model": {**MODEL, **MODELS["grouped"]}})
    sizes: dict[str, Any] = {"num_gpus": 4, "tp": 2, "ep": 2, "etp": 2} if world == 4 else {}
    (stage,) = adapters_per_stage(architecture(recipe, mtp_num_layers=0), ParallelLayout(**sizes, adapters=adapters))
    return stage.total


def test_grouped_experts(tmp_path: Path) -> None:
    """They have one adapter together, or one each, which is saved as sequential experts' are."""
    layout = {EP: 2, TP: 2, SP: True, ETP: 2}
    one = adapted("grouped", LoRA(dim=8), tmp_path)
    shared = adapted("grouped", LoRA(dim=8), tmp_path, 4, **layout)
    each = adapted("grouped", LoRA(dim=8, share_expert_adapters=False), tmp_path, 4, **layout)
    alone = adapted("sequential", LoRA(dim=8), tmp_path)
    for built, shares, world in ((one, True, 1), (shared, True, 4), (each, False, 4)):
        held = sum(weight.numel() for name, weight in built.model.named_parameters() if ".adapter." in name)
        assert held == predicted(Adapters(dim=8, share_expert_adapters=shares), world)
    assert shapes(shared) == shapes(one)
    assert shapes(each) == shapes(alone)
    experts = shared.model.decoder.layers[1].mlp.experts
    assert isinstance(experts.linear_fc1.adapter, SharedAdapter)
    assert experts.linear_fc1.adapter._own_rows().shape == (64, 8)  # half of gate and up projection
    layer = shared.model.decoder.layers[0]
    assert layer.self_attention.linear_qkv.to_wrap.return_layernorm_output
    assert layer.self_attention.linear_qkv.adapter.linear_in.weight.shape == (4, 64)
    trained = {name for name, weight in shared.model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in shared.model.named_parameters() if ".adapter." in name}
    assert len([p for group in shared.optimizer.param_groups for p in group["params"]]) > 0


def test_other_kinds_beside_grouped_experts(tmp_path: Path) -> None:
    """CanonicalLoRA has for them what LoRA has: their gate and up projection stay one. DoRA is for the rest."""
    layout = {EP: 2, TP: 2, SP: True, ETP: 2}
    for shares in (True, False):
        of_lora = shapes(adapted("grouped", LoRA(dim=8, share_expert_adapters=shares), tmp_path, 4, **layout))
        canonical = adapted("grouped", CanonicalLoRA(dim=8, share_expert_adapters=shares), tmp_path, 4, **layout)
        found = shapes(canonical)
        experts = {key for key in of_lora if ".experts." in key}
        assert experts
        assert {key: found[key] for key in experts} == {key: of_lora[key] for key in experts}
        assert found["self_attention.linear_qkv.adapter.adapter_k.linear_out.weight"] == (32, 8)
        assert canonical.model.decoder.layers[0].self_attention.linear_qkv.to_wrap.return_layernorm_output
    with pytest.raises(ConfigError, match="belongs to routed experts, which DoRA does not adapt; use LoRA"):
        adapted("grouped", DoRA(dim=8), tmp_path)
    outside = DoRA(dim=8, target_modules=["linear_qkv", "linear_proj", "*.shared_experts.*"])
    rest = shapes(adapted("grouped", outside, tmp_path, 4, **layout))
    assert rest == shapes(adapted("grouped", outside, tmp_path))
    assert rest["mlp.shared_experts.linear_fc1.adapter.weight_magnitude"] == (64,)  # gate and up projection


@pytest.mark.parametrize("kind", [LoRA, DoRA, CanonicalLoRA])
def test_kinds(kind: Any, tmp_path: Path) -> None:
    """Layers of a model of Transformer Engine have the adapters that those of a CPU have."""
    with_te = adapted("dense", kind(dim=8), tmp_path, 2, **{TP: 2, SP: True})
    config = configure("dense")
    config.peft, config.checkpoint.pretrained_checkpoint = kind(dim=8), str(tmp_path)
    on_a_cpu = build(config)
    assert shapes(with_te) == shapes(on_a_cpu)
    wholes = on_a_cpu.weights
    for name, weight in with_te.model.named_parameters():
        if name.endswith("linear_in.weight"):
            assert torch.equal(wholes[name].chunk(2, weight.partition_dim)[0], weight), name
