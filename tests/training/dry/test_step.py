"""A rehearsed step: its communication equals that of real ranks, its FLOPs the formula's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.flops import flops_per_token
from tests.training.conftest import run_ranks
from tests.training.dry.test_rank import run_program

pytestmark = pytest.mark.process
RANKS = 8
TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "vocab_size": 512,
    "seq_length": 64,
    "dtype": "bf16",
}
# Every token goes to every expert: balanced as it is
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 96, "num_layers": 4}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "tp2 pp2 dp2": ({"tp": 2, "pp": 2}, {}, {}),
    "tp2 pp2 cp2": ({"tp": 2, "pp": 2, "cp": 2}, {}, SHARDED),
    "ep2 x tp2 pp2": ({"tp": 2, "pp": 2, "ep": 2, "etp": 2}, EXPERTS, SHARDED),
    "ep4 tp2 vp2": ({"tp": 2, "pp": 2, "vp": 2, "ep": 4, "etp": 1}, EXPERTS, {}),
}


def container(
    sizes: dict[str, int], model: dict[str, Any], ddp: dict[str, Any], micro_batches: int = 4, world: int = RANKS
) -> dict[str, Any]:
    tp, pp, cp = (sizes.get(name, 1) for name in ("tp", "pp", "cp"))
    layout = {SIZES[name]: size for name, size in sizes.items()}
    batch = micro_batches * world // (tp * pp * cp)
    sections = {
        "model": {**TINY, **layout, "sequence_parallel": tp > 1, **model},
        "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": batch},
        "optimizer": {"lr": 1e-3},
        "scheduler": {},
        "ddp": ddp,
    }
    return container_data(sections)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_and_bytes_of_eight_real_ranks(layout: str, tmp_path: Path) -> None:
    config = tmp_path / "training.json"
    config.write_text(json.dumps(container(*LAYOUTS[layout])))
    run_ranks(RANKS, [str(Path(__file__).with_name("step_ranks.py")), str(config)], tmp_path)
    code, events = run_program(config, RANKS, "--level", "step", "--ranks", "0,1,2,3,4,5,6,7")
    assert code == 0, events[-1]
    steps = [each for each in events if each["event"] == "step"]
    assert [each["rank"] for each in steps] == list(range(RANKS))
    for step in steps:
        real = json.loads((tmp_path / f"counted{step['rank']}.json").read_text())
        assert step["communication"] == real["totals"], f"rank {step['rank']}"


DENSE = {"num_layers": 4, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64, "seq_length": 8192}
FULL: dict[str, dict[str, Any]] = {
    "dense": DENSE | {"num_query_groups": 64, "vocab_size": 128256},
    "gqa": DENSE | {"num_query_groups": 8, "vocab_size": 128256},
    "mla": DENSE
    | {
        "multi_latent_attention": True,
        "num_query_groups": 64,
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    },
    "moe": {
        "num_layers": 4,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "seq_length": 4096,
        "vocab_size": 151936,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_token_dispatcher_type": "alltoall",
    },
}


@pytest.mark.parametrize("name", FULL)
def test_flops_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    model = FULL[name]
    is_routed = "num_moe_experts" in model
    sizes = {"tp": 2, "pp": 2, "ep": 8, "etp": 1} if is_routed else {"tp": 4, "pp": 2}
    config = tmp_path / "training.json"
    document = container(sizes, model, SHARDED, world=32)
    config.write_text(json.dumps(document))
    code, events = run_program(config, 32, "--level", "step")
    assert (code, events[-1]["event"]) == (0, "matched"), events[-1]
    steps, layout = [each for each in events if each["event"] == "step"], events[1]["layout"]
    stages = {event["place"]["pp"]: event["rank"] for event in events if event["event"] == "built"}
    per_replica = sum(sum(step["flops"].values()) for step in steps if step["rank"] in stages.values())
    counted = per_replica * layout["tp"] * layout["cp"] * layout["dp"]
    tokens = document["train"]["global_batch_size"] * model["seq_length"]
    router = 6 * model["hidden_size"] * model.get("num_moe_experts", 0) * model["num_layers"]  # not in the formula
    expected = flops_per_token(SimpleNamespace(**document["model"])) + router
    assert counted / tokens == pytest.approx(expected, rel=1e-3)
    assert all(step["step_cpu_s"] < 180 for step in steps)
    assert all(step["peak_mib"] < 640 for step in steps)
    assert all(step["reserved_bytes"] >= max(step["peaks"].values()) > 0 for step in steps)
    assert 0 < events[-2]["idle"] < 1


def test_few_micro_batches_tell_what_all_do(tmp_path: Path) -> None:
    config = tmp_path / "training.json"
    found = {}
    sizes, model, _ = LAYOUTS["ep4 tp2 vp2"]
    # the optimizer's step gathers the first chunk: the first step has one gather more than those that follow
    early = (sizes, model, SHARDED | {"align_param_gather": True}), {"overlap_param_gather_with_optimizer_step": True}
    plain = {name: (LAYOUTS[name], {}) for name in ("tp2 pp2 cp2", "ep4 tp2 vp2")}
    for name, (layout, optimizer) in (plain | {"early": early}).items():
        document = container(*layout, micro_batches=14)
        document["optimizer"] |= optimizer
        config.write_text(json.dumps(document))
        for option in ((), ("--in-full",)):
            code, events = run_program(config, RANKS, "--level", "step", "--ranks", "0,6", *option)
            assert code == 0, events[-1]
            found[option] = [each for each in events if each["event"] == "step"]
        for few, every in zip(found[()], found["--in-full",], strict=True):
            assert (few["micro_batches_run"], every["micro_batches_run"]) == ([2, 4], [14])
            for key in ("communication", "flops"):
                assert few[key] == every[key], f"{name}: {key}"
            assert few["activations"] == every["activations"], name
