"""Every parallel layout trains the model of one process: same seed, same global batch, same loss curve."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data

pytest.importorskip("torch")

STEPS = 10
TOLERANCE = 1e-4
BASE: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 512,
        "seq_length": 64,
        "dtype": "fp32",
    },
    "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
    "scheduler": {"lr_warmup_iters": 2},
}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64}
MLA = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
LAYOUTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def train(directory: Path, processes: int, model: dict[str, Any], optimizer: dict[str, Any]) -> list[float]:
    """Run the loop under torchrun; return the losses of all steps."""
    config = {**BASE, "model": {**BASE["model"], **model}, "optimizer": {**BASE["optimizer"], **optimizer}}
    path = directory / "config.json"
    path.write_text(json.dumps(container_data(config)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, "-m", "cloudai_mbridge.training", "--config", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    marked = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("MBRIDGE_STEP ")]
    return [json.loads(record)["losses"]["lm loss"] for record in marked]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loss curve of a model on one process, trained once per model."""

    @cache
    def curve(model: str) -> list[float]:
        return train(tmp_path_factory.mktemp("one"), 1, json.loads(model), {})

    return lambda model: curve(json.dumps(model))


def check(tmp_path: Path, one_process: Any, processes: int, model: dict[str, Any], **layout: Any) -> None:
    optimizer = {"use_distributed_optimizer": layout.pop("dist_opt", False)}
    fields = {LAYOUTS.get(name, name): value for name, value in layout.items()}
    reference = one_process(model)
    losses = train(tmp_path, processes, {**model, **fields}, optimizer)
    assert len(reference) == len(losses) == STEPS
    assert reference[-1] < reference[0] - 0.1, "the reference did not learn"
    assert max(abs(a - b) for a, b in zip(reference, losses, strict=True)) < TOLERANCE


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(4, {"tp": 2, "pp": 2}, id="tp2-pp2"),
        pytest.param(4, {"tp": 2}, id="tp2-dp2"),
        pytest.param(2, {"dist_opt": True}, id="dp2-distopt"),
        pytest.param(2, {"tp": 2, "sequence_parallel": True}, id="tp2-sp"),
        pytest.param(2, {"pp": 2, "vp": 2}, id="pp2-vp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(
            2,
            {"pp": 2, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            id="pp2-counting-embedding-and-loss",
        ),
        pytest.param(2, {"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}, id="pp2-layout"),
        pytest.param(2, {"pp": 2, "vp": 2, "pipeline_model_parallel_layout": "Et|(t|)*2tL"}, id="pp2-vp2-layout"),
    ],
)
def test_dense_layout_equals_one_process(
    tmp_path: Path, one_process: Any, processes: int, layout: dict[str, Any]
) -> None:
    check(tmp_path, one_process, processes, {}, **layout)


@pytest.mark.parametrize(
    ("processes", "model", "layout"),
    [
        pytest.param(2, MOE, {"ep": 2}, id="moe-ep2"),
        pytest.param(2, MOE, {"tp": 2, "sequence_parallel": True, "etp": 1, "ep": 2}, id="moe-tp2-ep2"),
        pytest.param(2, MLA, {"tp": 2}, id="mla-tp2"),
    ],
)
def test_other_models_equal_one_process(
    tmp_path: Path, one_process: Any, processes: int, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    check(tmp_path, one_process, processes, model, **layout)


def test_full_recompute_changes_nothing(tmp_path: Path, one_process: Any) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    check(tmp_path, one_process, 1, {}, **recompute)


def test_bf16_trains(tmp_path: Path) -> None:
    losses = train(tmp_path, 1, {"dtype": "bf16"}, {})
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
