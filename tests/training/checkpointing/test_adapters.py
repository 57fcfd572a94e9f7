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
    results, out = launch(
        2,
        SHARED
        + """
from torch.distributed.checkpoint import FileSystemReader

def scenario():
    biased = {**MOE, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    for name, model in (("biased", biased), ("moe", MOE)):
        base = start(model=model, checkpoint={"save": name})
        base.train(1)
        base.save()
    before = [p.detach().clone() for p in base.model[0].parameters()]
    places = {"pretrained_checkpoint": "moe", "dist_ckpt_optim_fully_reshardable": True}
    wide = {**MOE, "hidden_dropout": 0.1}
    few = {**LORA, "target_modules": ["*.layers.3.*.linear_proj", "linear_nowhere"], "dropout": 0.1}
    sharded = {"use_distributed_optimizer": True}
    results = {
        "ep2": resumes_bit_equal("ep2", model={**biased, EP: 2}, peft=LORA, checkpoint={**places, "pretrained_checkpoint": "biased"}, optimizer=sharded)["same"],
        "pp2": resumes_bit_equal("pp2", model={**wide, PP: 2}, peft=few, checkpoint=places, optimizer=sharded)["same"],
        "another": difference_after(
            "tp2", {"model": {**MOE, TP: 2, SP: True, EP: 2, ETP: 1}, "peft": LORA}, {"model": {**MOE, PP: 2}, "peft": LORA}, **places
        ),
        "back": difference_after(
            "back", {"model": {**MOE, PP: 2}, "peft": LORA}, {"model": {**MOE, TP: 2, SP: True, ETP: 2}, "peft": LORA}, **places
        ),
    }
    keys = FileSystemReader("ep2/iter_0000002").read_metadata().state_dict_metadata
    results["others"] = sorted(key for key in keys if key.startswith("decoder.") and ".adapter." not in key)
    results["entries"] = len([key for key in keys if key.startswith("decoder.")])
    whole = adapted("moe", checkpoint={"load": "moe"}, **MOE)
    results["whole"] = refusal(whole)
    results["other"] = refusal(adapted("moe", {**LORA, "alpha": 1}, checkpoint={"load": "tp2"}, **MOE))
    results["without"] = refusal(start(model=MOE, checkpoint={"load": "tp2"}))
    frozen = [p for p in whole.model[0].parameters() if not p.requires_grad]
    whole.train(2)
    results["frozen"] = all(map(torch.equal, frozen, before)), len(frozen) == len(before)
    return results
""",
    )
    print(results[0], out[-3000:])
