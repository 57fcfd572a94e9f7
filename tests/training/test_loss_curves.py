"""Every parallel layout trains the model of one process: same seed, same global batch, same loss curve.

`docs/tables/loss-curves.csv` lists the layouts with the largest difference that was measured; -s prints it anew.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.figures import Figure
from tests.training.conftest import Train

pytest.importorskip("torch")

STEPS = 10
TOLERANCE = 1e-5
STEPS_OF_4 = {"train_iters": STEPS, "global_batch_size": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "mla": {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    },
    "mtp": {"mtp_num_layers": 2},
    "mtp-untied": {"mtp_num_layers": 2, "share_embeddings_and_output_weights": False},
}
SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "layout": "pipeline_model_parallel_layout",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dispatcher": "moe_token_dispatcher_type",
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
COUNTING = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@dataclass(frozen=True)
class Run:
    """A layout of a model; model_fields and optimizer_fields go over those of a tiny model."""

    processes: int = 1
    model: str = "dense"
    model_fields: dict[str, Any] = field(default_factory=dict)
    optimizer_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        model = {**MODELS[self.model], **self.model_fields}
        return {"model": model, "train": STEPS_OF_4, "optimizer": self.optimizer_fields}


def run(processes: int, model: str = "dense", dist_opt: bool = False, **fields: Any) -> Run:
    model_fields = {SHORT.get(name, name): value for name, value in fields.items()}
    return Run(processes, model, model_fields, {"use_distributed_optimizer": dist_opt})


LAYOUTS = {
    "tp2": run(2, tp=2),
    "tp2-sp": run(2, tp=2, sp=True),
    "pp2": run(2, pp=2),
    "pp2-counting-embedding-and-loss": run(2, pp=2, **COUNTING),
    "pp2-layout": run(2, pp=2, layout="Et|tttL"),
    "pp2-vp2": run(2, pp=2, vp=2),
    "pp2-vp2-layout": run(2, pp=2, vp=2, layout="Et|(t|)*2tL"),
    "dp2": run(2),
    "dp2-distopt": run(2, dist_opt=True),
    "cp2": run(2, cp=2),
    "tp2-pp2": run(4, tp=2, pp=2),
    "tp2-dp2": run(4, tp=2),
    "moe-ep2-alltoall": run(2, "moe", ep=2, dispatcher="alltoall"),
    "moe-ep2-allgather": run(2, "moe", ep=2, dispatcher="allgather"),
    "moe-tp2-sp-ep2": run(2, "moe", tp=2, sp=True, etp=1, ep=2),
    "mla-tp2": run(2, "mla", tp=2),
    "mtp-pp3-middle": run(3, "mtp", pp=3, layout="Ett|ttmm|L"),
    "mtp-untied-pp3-middle": run(3, "mtp-untied", pp=3, layout="Ett|ttmm|L"),
    "mtp-untied-pp2-first": run(2, "mtp-untied", pp=2, layout="Ettttmm|L"),
    "mtp-pp4-vp2-middle": run(4, "mtp", pp=4, vp=2, layout="E|t|t|t|t|mm||L"),
    "full-recompute": run(1, **FULL),
    "selective-recompute": run(1, **SELECTIVE),
    "tp2-sp-full-recompute": run(2, tp=2, sp=True, **FULL),
    "tp2-sp-selective-recompute": run(2, tp=2, sp=True, **SELECTIVE),
}
ONE_PROCESS = {f"one-{model}": Run(model=model) for model in MODELS}
RUNS = {**LAYOUTS, **ONE_PROCESS, "bf16": Run(model_fields={"dtype": "bf16"})}

Losses = Callable[[str, int], list[float]]
# One layout of each kind, for half of the steps; `make test-long` trains all
QUICK = ("tp2-sp", "pp2-vp2", "cp2", "dp2-distopt", "moe-ep2-alltoall", "mtp-pp3-middle", "full-recompute")
CASES = [
    *(pytest.param(name, STEPS // 2, id=name) for name in QUICK),
    *(pytest.param(name, STEPS, id=f"{name}-to-the-end", marks=pytest.mark.long) for name in LAYOUTS),
]


@pytest.fixture
def losses(train_once: Train) -> Losses:
    """Return the losses of the first steps of a run: losses("tp2", 5)."""

    def of(name: str, steps: int) -> list[float]:
        run = RUNS[name]
        curve = list(train_once(run.processes, run.sections, f"train.exit_interval={steps}").losses.values())
        assert len(curve) == steps
        return curve

    return of


@pytest.mark.process
@pytest.mark.parametrize(("name", "steps"), CASES)
def test_layout_equals_one_process(losses: Losses, name: str, steps: int, figure: Figure) -> None:
    reference = losses(f"one-{LAYOUTS[name].model}", steps)
    difference = max(abs(a - b) for a, b in zip(reference, losses(name, steps), strict=True))
    figure(f"{difference:.1e}")
    assert reference[-1] < reference[0] - 0.1, "the reference did not learn"
    assert difference < TOLERANCE


@pytest.mark.process
def test_bf16_trains(losses: Losses) -> None:
    curve = losses("bf16", STEPS // 2)
    assert curve[-1] < curve[0] - 0.1


def test_the_table_lists_every_layout_once_with_what_was_measured() -> None:
    with (Path(__file__).parents[2] / "docs" / "tables" / "loss-curves.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["test"] for row in rows] == list(LAYOUTS)
    assert [int(row["processes"]) for row in rows] == [layout.processes for layout in LAYOUTS.values()]
    assert all(0 <= float(row["largest difference"]) < TOLERANCE for row in rows)
