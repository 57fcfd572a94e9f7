"""Parameters of every rank equal those of the model that Megatron-Core builds, on the meta device."""

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.memory.layout import Implementation, ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import active_parameters, parameters_per_stage, total_parameters
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.recipes.load import recipe_names
from tests.figures import Figure

_spec = importlib.util.spec_from_file_location("real_parameters", Path(__file__).with_name("real_parameters.py"))
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
Case, SIZES = _shared.Case, _shared.SIZES
arguments, count, predicted, ranks, recipe_of = (
    getattr(_shared, name) for name in ("arguments", "count", "predicted", "ranks", "recipe_of")
)

pytestmark = [pytest.mark.filterwarnings("ignore")]

# Of the recipe's shape; routed in groups, where the recipe does that
FEW_EXPERTS = dict.fromkeys(
    ("model.num_moe_experts", "model.moe_router_num_groups", "model.moe_router_group_topk"), "4"
)
# test_hybrid_parameters.py has the others
EMBEDDED = [
    name
    for name in recipe_names()
    if load_recipe(name).family not in ("nemotronh", "gpt_oss") and not load_recipe(name).not_embedded
]


def _is_moe(recipe: str) -> bool:
    return bool(load_recipe(recipe).default("model", "num_moe_experts"))


def _places(recipe: str) -> int:
    """Layers that the embedding and the loss count for."""
    return sum(
        bool(load_recipe(recipe).default("model", f"account_for_{end}_in_pipeline_split"))
        for end in ("embedding", "loss")
    )


def grid() -> Iterator[Case]:
    """Yield the recipes in all even layouts: 4 experts of the recipe's shape, where it has experts."""
    for recipe in EMBEDDED:
        fewer = FEW_EXPERTS if _is_moe(recipe) and recipe != "moe_tiny" else {}
        expert_sizes = [(ep, etp) for ep in SIZES for etp in SIZES] if _is_moe(recipe) else [(1, None)]
        for tp, pp, (ep, etp) in itertools.product(SIZES, SIZES, expert_sizes):
            layers = (4 if _is_moe(recipe) else 8) - _places(recipe)
            yield Case(recipe, layers, tp, pp, ep, etp, extra=fewer)
        if _is_moe(recipe):
            continue
        for tp, pp, vp in itertools.product((1, 2), (2, 4), (2,)):
            yield Case(recipe, 8 - _places(recipe), tp, pp, vp=vp)


TIED = {"model.share_embeddings_and_output_weights": "true"}
PLAIN = {
    "model.normalization": "LayerNorm",
    "model.gated_linear_unit": "false",
    "model.add_bias_linear": "true",
    "model.position_embedding_type": "learned_absolute",
}
VARIANTS: dict[str, dict[str, str]] = {
    "tied": TIED,
    "biases, LayerNorm, no gate, learned positions": PLAIN,
    "bias of the projections only": {"model.add_qkv_bias": "true"},
    "output gate": {"model.attention_output_gate": "true"},
    "norms of queries and keys": {"model.qk_layernorm": "true"},
    "heads of another size": {"model.kv_channels": "48"},
    "odd vocabulary": {"model.make_vocab_size_divisible_by": "96"},
    "unpadded": {"model.should_pad_vocab": "false"},
}


def special() -> Iterator[Case]:
    """Yield what the recipes do not have, and layouts that are not even."""
    for (name, extra), tp, pp in itertools.product(VARIANTS.items(), SIZES, SIZES):
        yield Case("gpt_tiny", 4, tp, pp, extra=extra)
        if name not in ("biases, LayerNorm, no gate, learned positions",):
            yield Case("moe_tiny", 4, tp, pp, 2, 1, extra=extra)
    for tp, pp in itertools.product((1, 2), SIZES):
        for name in ("deepseek_v3", "kimi_k2"):
            yield Case(name, 4, tp, pp, has_q_lora=False, extra=FEW_EXPERTS)
            yield Case(name, 4, tp, pp, extra={"model.qk_layernorm": "false", **FEW_EXPERTS})
        yield Case("moe_tiny", 4, tp, pp, extra={"model.moe_shared_expert_gate": "true"})
        yield Case("moe_tiny", 4, tp, pp, extra={"model.moe_layer_freq": "2"})
        yield Case("moe_tiny", 4, tp, pp, extra={"model.moe_layer_freq": "[0, 1, 1, 0]"})
    for pp, ends in itertools.product((2, 4), ((3, None), (None, 1), (1, 1))):
        names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        given = {f"model.{name}": str(count) for name, count in zip(names, ends, strict=True) if count is not None}
        taken = sum(count or 0 for count in ends)
        middle = pp - len(given)
        yield Case("moe_tiny", taken + 2 * middle, 2, pp, extra={**given, "model.moe_layer_freq": "3"})
    for mtp, tied in ((1, {}), (2, {}), (1, TIED)):
        for recipe in ("gpt_tiny", "moe_tiny"):
            for pp in SIZES:
                yield Case(recipe, 4, 1, pp, extra={"model.mtp_num_layers": str(mtp), **tied})
            m = "m" * mtp
            yield Case(recipe, 5, 1, 2, layout=f"Ettt|tt{m}L", extra={"model.mtp_num_layers": str(mtp), **tied})
            yield Case(recipe, 5, 1, 2, vp=2, layout=f"Et|tt|t|t{m}L", extra={"model.mtp_num_layers": str(mtp), **tied})
    for layout, pp, vp in (("Et|tttt|L", 3, 1), ("Ettt|t|t|L", 2, 2), ("E|tt|t|ttL", 4, 1), ("Et|t|t|ttL", 2, 2)):
        for tied in ({}, TIED):
            yield Case("moe_tiny", 5, 1, pp, vp=vp, layout=layout, extra={"model.moe_layer_freq": "2", **tied})


CASES = [*grid(), *special()]


def real(megatron: Any, case: Case) -> list[tuple[int, int]]:
    """Return stage and number of parameters of every rank."""
    args, extra = arguments(case)
    sections = training_config(recipe_of(case), args, {**extra, "model.perform_initialization": "false"})
    if "model.mtp_num_layers" in extra:  # Megatron's own norm, in these layers, refuses sequence parallelism
        sections["model"]["sequence_parallel"] = False
    changes = {} if case.has_q_lora else {"q_lora_rank": None}
    found = []
    for rank in ranks(case):
        config = megatron.enter(sections, rank, case.world_size, changes)
        found.append(count(megatron.chunks(config, "meta")))
    return found


_SHARES = (14, pytest.param(1, marks=pytest.mark.drill))


@pytest.mark.parametrize("share", _SHARES, ids=["a fourteenth", "all"])
def test_every_rank_holds_what_megatron_core_builds(share: int, megatron: Any, figure: Figure) -> None:
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for case in CASES[::share]:
        if not case.has_q_lora and find_spec("megatron.core.transformer.mla_qk_norm_config"):
            counts["refused by Megatron-Core without Transformer Engine"] += 1  # since 0.19
            continue
        stages = predicted(case)
        held = real(megatron, case)
        counts["layouts"] += 1
        counts["ranks"] += len(held)
        counts[case.recipe] += 1
        if different := {(stage, there, stages[stage]) for stage, there in held if there != stages[stage]}:
            wrong.append(f"{case}: stage, real, predicted: {sorted(different)}")
    figure(f"parameters: {dict(counts)}, different: {len(wrong)}")
    assert wrong == []
    assert counts["layouts"] >= 680 // share
    assert set(EMBEDDED) <= counts.keys()


@pytest.mark.parametrize(
    ("recipe", "total", "active"),
    [
        ("llama3_8b", 8_030_261_248, 8.03e9),
        ("qwen3_30b_a3b", 30_532_122_624, 3.3e9),
        ("qwen3_235b_a22b", 235_093_634_560, 22e9),
        ("deepseek_v3", 671_026_404_352, 37e9),
    ],
)
def test_known_models(recipe: str, total: int, active: float) -> None:
    """The totals are those of the published weights; of the active ones only rounded figures are."""
    model = architecture(load_recipe(recipe), mtp_num_layers=0)
    assert total_parameters(model) == total
    assert active_parameters(model) == pytest.approx(active, rel=0.02)


def test_transformer_engine_repeats_the_down_projections() -> None:
    """The one difference: query and key-value latents are computed on every tensor-parallel rank."""
    model = architecture(load_recipe("deepseek_v3"), mtp_num_layers=0)
    fused, torch_modules = (
        parameters_per_stage(model, ParallelLayout(num_gpus=4, tp=4, ep=4, etp=1, implementation=implementation))[
            0
        ].total
        for implementation in (Implementation.FUSED, Implementation.TORCH)
    )
    down = model.hidden_size * ((model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim)
    assert fused - torch_modules == model.num_layers * down * 3 // 4
