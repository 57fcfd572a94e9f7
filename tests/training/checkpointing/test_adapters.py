"""Adapters: the same losses in every layout, checkpoints of them alone, and merged weights."""

import pytest

SHARED = """
from cloudai_mbridge.training.merge_adapters import save_merged
from torch.distributed.checkpoint import FileSystemReader
import small_run

small_run._data = partial(lambda every, cfg, step: every(cfg, step % 2), small_run._data)  # which can be learnt
LORA = {"_target_": "LoRA", "dim": 4, "alpha": 32}
KINDS = {
    "lora": {**LORA, "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"]},
    "canonical": {**LORA, "_target_": "CanonicalLoRA"},
    "dora": {**LORA, "_target_": "DoRA", "target_modules": ["linear_qkv", "linear_proj", "*.layers.0.mlp.linear_fc1"]},
}
MOE = {
    "num_layers": 2,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_layer_freq": [0, 1],
}
TP, PP, EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
ETP, SP = "expert_tensor_parallel_size", "sequence_parallel"

def adapted(kind="lora", checkpoint=None, **model):
    places = {"pretrained_checkpoint": "base", "dist_ckpt_optim_fully_reshardable": True, **(checkpoint or {})}
    return start(model={**MOE, **model}, peft=KINDS[kind], checkpoint=places)

def losses(kind="lora", **model):
    return adapted(kind, **model).train(STEPS)

STEPS = 5
"""


def test_layouts(launch):
    (one,), _ = launch(
        1,
        SHARED
        + """
def merged(kind):
    run = adapted(kind)
    found = run.train(STEPS)
    save_merged(run.state, run.model, f"merged {kind}")
    assert not any(".adapter." in name for name, _ in run.model[0].named_parameters())
    plain = start(model=MOE, checkpoint={"pretrained_checkpoint": f"merged {kind}"})
    plain.load()
    return found[:-1], found[-1], plain.train(1)[0]

def scenario():
    base = start(model=MOE, checkpoint={"save": "base"})
    base.train(1)
    base.save()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {**{kind: losses(kind) for kind in KINDS}, "recomputed": losses(**full)}
""",
    )
    print(one)
    assert one["recomputed"] == one["lora"]
    results, _ = launch(
        2,
        SHARED
        + """
def scenario():
    return {
        "dp2": ("lora", losses()),
        "pp2": ("lora", losses(**{PP: 2})),
        "tp2 ep2 etp1": ("lora", losses(**{TP: 2, SP: True, EP: 2, ETP: 1})),
        "tp2 etp2": ("canonical", losses("canonical", **{TP: 2, SP: True, ETP: 2})),
        "ep2": ("canonical", losses("canonical", **{EP: 2})),
        "decomposed": ("dora", losses("dora", **{TP: 2, SP: True, ETP: 2})),
    }
""",
    )
    for name, (kind, found) in results[0].items():
        print(name, kind, max(abs(a - b) for a, b in zip(found, one[kind], strict=True)), found[0], found[-1])
    for name, (kind, found) in results[0].items():
        assert found == pytest.approx(one[kind], abs=1e-5), name
