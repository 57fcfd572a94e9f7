"""Adapters: the same losses in every layout, and checkpoints of them alone."""

import pytest

SHARED = """
LORA = {"_target_": "LoRA", "dim": 4, "alpha": 8}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_layer_freq": [0, 1, 1, 1],
}
TP, PP, EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
ETP, SP, VP = "expert_tensor_parallel_size", "sequence_parallel", "virtual_pipeline_model_parallel_size"

def adapted(base, peft=LORA, steps=20, checkpoint=None, **model):
    places = {"pretrained_checkpoint": base, **(checkpoint or {})}
    return start(model=model, peft=peft, checkpoint=places)

def losses(base, peft=LORA, steps=20, **model):
    return adapted(base, peft, **model).train(steps)
"""


def test_layouts(launch):
    (one,), _ = launch(
        1,
        SHARED
        + """
def scenario():
    for name, model in (("dense", {}), ("moe", MOE)):
        base = start(model=model, checkpoint={"save": name})
        base.train(1)
        base.save()
    return {"dense": losses("dense"), "moe": losses("moe", **MOE)}
""",
    )
    results, _ = launch(
        2,
        SHARED
        + """
def scenario():
    return {
        "dense": {
            "dp2": losses("dense"),
            "tp2": losses("dense", **{TP: 2}),
            "tp2 sp": losses("dense", **{TP: 2, SP: True}),
            "tp2 sp a2a": losses("dense", {**LORA, "a2a_experimental": True}, **{TP: 2, SP: True}),
            "pp2": losses("dense", **{PP: 2}),
            "vp2": losses("dense", **{PP: 2, VP: 2}),
        },
        "moe": {
            "ep2": losses("moe", **MOE, **{EP: 2}),
            "tp2 ep2 etp1": losses("moe", **MOE, **{TP: 2, SP: True, EP: 2, ETP: 1}),
            "tp2 etp2": losses("moe", **MOE, **{TP: 2, SP: True, ETP: 2}),
        },
    }
""",
    )
    for model, layouts in results[0].items():
        for name, found in layouts.items():
            print(model, name, max(abs(a - b) for a, b in zip(found, one[model], strict=True)), found[0], found[-1])
    for model, layouts in results[0].items():
        for name, found in layouts.items():
            assert found == pytest.approx(one[model], abs=1e-5), (model, name)
