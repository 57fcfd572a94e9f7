"""Parameters of adapters on every rank equal those that the embedded loop builds beside Megatron-Core's layers."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.memory.adapter_parameters import active_adapters, adapters_per_stage
from cloudai_mbridge.estimate.memory.estimate import memory_per_stage
from cloudai_mbridge.estimate.memory.layout import Adapters, Implementation, ParallelLayout, adapters_of
from cloudai_mbridge.estimate.memory.without_model import without_model
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.container import container_data
from tests.golden import Sentence

pytest.importorskip("torch")

ALL: dict[str, Any] = {"target_modules": [], "exclude_modules": ["output_layer"]}
SIZES = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "ep": "expert_model_parallel"}
SIZES |= {"etp": "expert_tensor_parallel"}
# recipe, layout, class, fields of the section, of the model
CASES: list[tuple[str, dict[str, int], str, dict[str, Any], dict[str, Any]]] = [
    ("gpt_tiny", {"tp": 2, "pp": 2}, "LoRA", {"dim": 8}, {}),
    ("gpt_tiny", {"tp": 2}, "DoRA", {"dim": 4, "target_modules": ["linear_qkv", "linear_proj", "linear_fc1"]}, {}),
    ("gpt_tiny", {"tp": 2}, "CanonicalLoRA", {"dim": 6}, {}),
    ("gpt_tiny", {}, "CanonicalLoRA", {"dim": 3, "target_modules": ["linear_q", "linear_fc1_up"]}, {}),
    ("gpt_tiny", {}, "LoRA", ALL, {"mtp_num_layers": 1, "gated_linear_unit": False, "add_bias_linear": True}),
    ("moe_tiny", {"tp": 2, "ep": 2, "etp": 2}, "LoRA", {"dim": 6, "normalize_moe_lora": True}, {}),
    ("moe_tiny", {"ep": 2}, "LoRA", {"target_modules": ["router", "linear_fc2"]}, {}),
    (
        "moe_tiny",
        {"tp": 2},
        "CanonicalLoRA",
        {**ALL, "exclude_modules": ["linear_proj", "output_layer"]},
        {"moe_layer_freq": 2},
    ),
]


def built(megatron: Any, recipe: str, sizes: dict[str, int], peft: Any, model: dict[str, Any]) -> list[int]:
    """Return how many parameters adapters have on the first rank of every pipeline stage."""
    from cloudai_mbridge.training.cpu import megatron_device
    from cloudai_mbridge.training.peft.apply import adapt

    sections = {name: dict(values) for name, values in load_recipe(recipe).sections.items()}
    data = container_data({**sections, "model": {**sections["model"], "dtype": "fp32", **model}})
    data["model"] |= {f"{SIZES[name]}_size": size for name, size in sizes.items()}
    data["model"]["sequence_parallel"] = sizes.get("tp", 1) > 1
    data["train"] |= {"train_iters": 1, "global_batch_size": 4, "micro_batch_size": 1}
    ranks, stages = num_gpus(sizes), sizes.get("pp", 1)
    counts = []
    for rank in range(0, ranks, ranks // stages):
        (chunk,) = megatron.chunks(megatron.enter(data, rank, ranks), "cpu")
        chunk.requires_grad_(False)
        with megatron_device():
            adapt(chunk, peft, 1)
        counts.append(sum(each.numel() for each in chunk.parameters() if each.requires_grad))
    return counts


def num_gpus(sizes: dict[str, int]) -> int:
    return max(sizes.get("tp", 1), sizes.get("ep", 1) * sizes.get("etp", 1)) * sizes.get("pp", 1)


def model_of(recipe: str, **model: Any) -> Architecture:
    loaded = load_recipe(recipe)
    extra = {f"model.{name}": str(value).lower() for name, value in model.items()}
    return architecture(loaded, None, extra, mtp_num_layers=model.get("mtp_num_layers", 0))


@pytest.mark.filterwarnings("ignore")
def test_every_stage_holds_what_the_loop_builds(megatron: Any) -> None:
    from cloudai_mbridge.training.peft import config

    for recipe, sizes, kind, fields, model in CASES:
        peft = getattr(config, kind)(**fields)
        adapters = adapters_of({"_target_": f"a.{kind}", **fields})
        layout = ParallelLayout(num_gpus(sizes), **sizes, implementation=Implementation.TORCH, adapters=adapters)
        predicted = [each.total for each in adapters_per_stage(model_of(recipe, **model), layout)]
        assert predicted == built(megatron, recipe, sizes, peft, model), (recipe, sizes, kind, fields)


def test_states_of_frozen_weights() -> None:
    """Weights have two bytes each; adapters 2, 4 of gradients, and 12 over the data-parallel ranks."""
    model, frozen = architecture(load_recipe("llama3_8b"), mtp_num_layers=0), Adapters(dim=8)
    (before,) = memory_per_stage(model, ParallelLayout(num_gpus=8))
    (after,) = memory_per_stage(model, ParallelLayout(num_gpus=8, adapters=frozen))
    count = after.parameters - before.parameters
    assert count == active_adapters(model, frozen) == 32 * 8 * (10240 + 8192 + 32768 + 18432)
    assert after.terms["weights"] == 2 * after.parameters
    assert (after.terms["gradients"], after.terms["optimizer"]) == (4 * count, 12 * count / 8)
    assert before.activations < after.activations < 1.01 * before.activations
    (fewer,) = memory_per_stage(model, ParallelLayout(adapters=Adapters(target_modules=("linear_qkv",))))
    assert fewer.activations < before.activations  # layers without adapters need no input


@pytest.mark.parametrize(
    ("recipe", "section", "tp"),
    [
        ("llama3_8b", {"target_modules": ["*.layers.0.*"]}, 1),
        ("llama3_8b", {"target_modules": None, "exclude_modules": ["*.0.linear_qkv"]}, 1),
        ("llama3_8b", {"_target_": "a.VLMLoRA"}, 1),
        ("llama3_8b", {"dim": 6}, 4),
        ("llama3_8b", {"dim": "many"}, 1),
        ("llama3_8b", {"target_modules": "linear_qkv"}, 1),
        ("qwen3_30b_a3b", {"_target_": "a.DoRA"}, 1),
        ("qwen3_30b_a3b", {"dim": 12, "normalize_moe_lora": True}, 1),
    ],
    ids=[
        "may be any module",
        "exclusion of single layers",
        "VLMLoRA are not modelled",
        "peft dim 6 cannot be",
        "peft dim many is not",
        "is not a list",
        "belongs to routed experts",
        "peft dim 12 is not",
    ],
)
def test_what_is_not_modelled(sentence: Sentence, recipe: str, section: dict[str, Any], tp: int) -> None:
    model = architecture(load_recipe(recipe), mtp_num_layers=0)
    with pytest.raises(BadInput) as caught:
        memory_per_stage(model, ParallelLayout(num_gpus=tp, tp=tp, adapters=adapters_of(section)))
    sentence(caught)


def test_adapters_of_single_layers_are_counted_in_all() -> None:
    model = architecture(load_recipe("llama3_8b"), mtp_num_layers=0)
    single, everywhere = (adapters_of({"target_modules": [name]}) for name in ("*.layers.0.*.linear_qkv", "linear_qkv"))
    assert active_adapters(model, single) == active_adapters(model, everywhere) > 0
    layouts = (ParallelLayout(adapters=adapters) for adapters in (single, everywhere))
    at_most, known = (without_model({}, {}, layout) for layout in layouts)
    assert (at_most.bound, known.bound) == ("at most", "")
    assert "peft of single layers (*.layers.0.*.linear_qkv) saves memory" in str(at_most)
