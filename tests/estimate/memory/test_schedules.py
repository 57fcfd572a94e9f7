"""Micro-batches in flight: the real 1F1B and interleaved schedules, and real expert parallelism, on ranks with gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.activations import activations_per_stage, in_flight
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.container import container_data
from tests.figures import Figure
from tests.training.conftest import run_ranks

pytestmark = pytest.mark.process

pytest.importorskip("torch")

MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 1024,
    "seq_length": 32,
    "dtype": "bf16",
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "num_layers": 4}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# ranks, micro-batches per step and pipeline, and what differs from MODEL
PIPELINES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"pp": 2}, {}),
    (6, {"pp": 2}, {}),
    (4, {"pp": 2, "vp": 2}, {}),
    (6, {"pp": 2, "vp": 4}, {}),
    (4, {"pp": 2, "vp": 2}, FULL),
    (4, {"pp": 2, "pipeline_layout": "Et*5|t*3L"}, {}),
    (2, {"ep": 2, "etp": 1}, EXPERTS),
    (2, {"ep": 2, "etp": 1}, {**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    (4, {"pp": 2, "vp": 2, "ep": 1}, EXPERTS),
    (1, {"tp": 2, "ep": 2, "etp": 1}, EXPERTS),
    (1, {"tp": 2, "ep": 1, "etp": 2}, EXPERTS),
    (1, {"tp": 2, "ep": 2, "etp": 1}, {**EXPERTS, **LATENT, "moe_shared_expert_intermediate_size": 64}),
]
FOUR: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (8, {"pp": 4}, {}),
    (8, {"pp": 4, "vp": 2}, {}),
    (4, {"pp": 4, "vp": 2}, {}),
    (4, {"pp": 2, "tp": 2}, {}),
]
_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "pipeline_layout": "pipeline_model_parallel_layout",
}


def _layout(
    ranks: int, microbatches: int, sizes: dict[str, Any], model: dict[str, Any], imbalance: float
) -> ParallelLayout:
    recompute = Recompute(
        Granularity(model.get("recompute_granularity", "none")),
        frozenset(model.get("recompute_modules", ())),
        num_layers=model.get("recompute_num_layers", 1),
    )
    layout = ParallelLayout(num_gpus=ranks, **sizes)
    return ParallelLayout(
        num_gpus=ranks,
        gbs=microbatches * layout.dp,
        recompute=recompute,
        moe_imbalance=max(1.0, imbalance),
        precision=Precision.BF16,
        implementation=Implementation.TORCH,
        **sizes,
    )


def _container(ranks: int, microbatches: int, sizes: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    layout = _layout(ranks, microbatches, sizes, model, 1.0)
    parallel = {_NAMES[name]: size for name, size in sizes.items()}
    return container_data(
        {
            "model": {**MODEL, **model, **parallel, "sequence_parallel": layout.tp > 1},
            "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": layout.gbs},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.mark.parametrize(("ranks", "cases"), [(2, PIPELINES), pytest.param(4, FOUR, marks=pytest.mark.drill)])
def test_estimate_against_real_schedules(ranks: int, cases: list[Any], tmp_path: Path, figure: Figure) -> None:
    (tmp_path / "configurations.json").write_text(json.dumps([_container(ranks, *case) for case in cases]))
    script = Path(__file__).with_name("schedule_ranks.py")
    run_ranks(ranks, [str(script), str(tmp_path / "configurations.json"), str(tmp_path)], tmp_path)
    errors = {}
    for rank in range(ranks):
        for case, found in zip(cases, json.loads((tmp_path / f"rank{rank}.json").read_text()), strict=True):
            if found["imbalance"] < 1:
                continue  # the estimate is for the fullest rank
            model = architecture(Recipe("case", "", "", "", {"model": {**MODEL, **case[2]}}), mtp_num_layers=0)
            stages = activations_per_stage(model, _layout(ranks, *case, found["imbalance"]))
            errors[f"rank {rank} of {case}"] = sum(stages[found["stage"]].values()) / found["peak"] - 1
    worst = max(errors, key=lambda name: abs(errors[name]))
    figure(f"schedules: {len(errors)} ranks, worst {errors[worst]:+.2%} ({worst})")
    assert {name: f"{error:+.2%}" for name, error in errors.items() if abs(error) > 0.03} == {}


@pytest.mark.parametrize(
    ("pp", "vp", "microbatches", "first_rank", "last_rank"),
    [
        (1, 1, 8, 1, 1),
        (4, 1, 8, 4, 1),
        (4, 1, 2, 2, 1),  # fewer micro-batches than stages
        (4, 2, 8, 2 * 3 + 4 + 1, 4 + 1),
        (8, 4, 64, 2 * 7 + 3 * 8 + 1, 3 * 8 + 1),
        (4, 2, 4, 8, 5),  # all forward passes come before the first backward pass
    ],
)
def test_most_chunks_in_flight(pp: int, vp: int, microbatches: int, first_rank: int, last_rank: int) -> None:
    for rank, most in ((0, first_rank), (pp - 1, last_rank)):
        moments = in_flight(pp, rank, vp, microbatches)
        assert max(sum(counts) for counts, _ in moments) == most
        assert all(len(counts) == vp and counts[backward] > 0 for counts, backward in moments)
