"""Adapters: the same losses in every layout, and checkpoints of them alone."""

import pytest

SHARED = """
import small_run

small_run._data = partial(lambda every, cfg, step: every(cfg, step % 2), small_run._data)  # which can be learnt
LORA = {"_target_": "LoRA", "dim": 4, "alpha": 32}
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


def test_checkpoints(launch):
    """They hold adapters alone, and are resumed bit-equal, or in another layout."""
    results, _ = launch(
        2,
        SHARED
        + """
from torch.distributed.checkpoint import FileSystemReader

from cloudai_mbridge.training.errors import ConfigError

def places(base):
    return {"pretrained_checkpoint": base, "dist_ckpt_optim_fully_reshardable": True}

def resumes(name, base="moe", peft=LORA, **model):
    sharded = {"use_distributed_optimizer": True}
    return resumes_bit_equal(name, model=model, peft=peft, checkpoint=places(base), optimizer=sharded)["same"]

def difference(name, one, other):
    one, other = ({"model": {**MOE, **layout}, "peft": LORA} for layout in (one, other))
    return difference_after(name, one, other, **places("moe"))

def scenario():
    biased = {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    for name, model in (("biased", biased), ("moe", MOE)):
        base = start(model=model, checkpoint={"save": name})
        base.train(1)
        base.save()
    before = [p.detach().clone() for p in base.model[0].parameters()]
    few = {**LORA, "target_modules": ["*.layers.3.*.linear_proj", "*.layers.1.*.linear_fc2", "nowhere"], "dropout": 0.1}
    results = {
        "bit equal": [
            *resumes("ep2", "biased", **biased, **{EP: 2}),
            *resumes("pp2", peft=few, **MOE, hidden_dropout=0.1, **{PP: 2}),
            *resumes("experts", peft={**LORA, "target_modules": ["*.local_experts.*"]}, **MOE, **{EP: 2}),
        ],
        "differences": [
            difference("tp2", {TP: 2, SP: True, EP: 2, ETP: 1}, {PP: 2}),
            difference("back", {PP: 2}, {TP: 2, SP: True, ETP: 2}),
        ],
    }
    keys = FileSystemReader("ep2/iter_0000002").read_metadata().state_dict_metadata
    names = [key for key in keys if key.startswith("decoder.")]
    results["others"] = sorted({key.partition(".mlp.")[2] for key in names if ".adapter." not in key})
    results["entries"] = len(names)
    whole = adapted("moe", checkpoint={"load": "moe"}, **MOE)
    results["refused"] = [
        refusal(whole),
        refusal(adapted("moe", {**LORA, "alpha": 1}, checkpoint={"load": "tp2"}, **MOE)),
        refusal(start(model=MOE, checkpoint={"load": "tp2"})),
    ]
    frozen = [p for p in whole.model[0].parameters() if not p.requires_grad]
    whole.train(2)
    results["frozen"] = [*map(torch.equal, frozen, before), len(frozen) == len(before)]
    return results
""",
    )
    print(results[0])
