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
    "dora": {**LORA, "_target_": "DoRA", "target_modules": ["linear_qkv", "linear_proj", "*.layers.0.mlp.linear_fc*"]},
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

SMALL = {"train": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 2}}

def adapted(kind="lora", checkpoint=None, **model):
    places = {"pretrained_checkpoint": "base", "dist_ckpt_optim_fully_reshardable": True, **(checkpoint or {})}
    return start(**SMALL, model={**MOE, **model}, peft=KINDS[kind], checkpoint=places)

def losses(kind="lora", **model):
    return adapted(kind, **model).train(STEPS)

STEPS = 3
"""


def test_layouts_and_merged_weights(launch):
    (one,), _ = launch(
        1,
        SHARED
        + """
def merged(kind):
    run = adapted(kind)
    found = run.train(STEPS)
    step = run.state.train_state.step
    before = [p.detach().clone() for p in run.model[0].parameters()]
    next_loss = run.train(1)[0]
    with torch.no_grad():
        for parameter, value in zip(run.model[0].parameters(), before, strict=True):
            parameter.copy_(value)
    save_merged(run.state, run.model, f"merged {kind}")
    plain = start(**SMALL, model=MOE, checkpoint={"pretrained_checkpoint": f"merged {kind}"})
    plain.load()
    plain.state.train_state.step = step
    return found, next_loss, plain.train(1)[0]

def scenario():
    base = start(**SMALL, model=MOE, checkpoint={"save": "base"})
    base.train(1)
    base.save()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    run = adapted(**full)
    frozen = [p for p in run.model[0].parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    recomputed = run.train(STEPS)
    return {
        "merged": {kind: merged(kind) for kind in KINDS},
        "recomputed": recomputed,
        "is_frozen": all(map(torch.equal, frozen, before)) and len(frozen) == len(list(base.model[0].parameters())),
    }
""",
    )
    assert one["is_frozen"]
    losses = {kind: found for kind, (found, _, _) in one["merged"].items()}
    assert one["recomputed"] == losses["lora"]
    for kind, (_, adapted, merged) in one["merged"].items():
        assert merged == pytest.approx(adapted, abs=1e-5), kind
    results, _ = launch(
        2,
        SHARED
        + """
def scenario():
    KINDS["regather"] = {**KINDS["lora"], "sequence_parallel_input_regather": True}
    return {
        "dp2": ("lora", losses()),
        "pp2": ("lora", losses(**{PP: 2})),
        "tp2 ep2 etp1": ("lora", losses("regather", **{TP: 2, SP: True, EP: 2, ETP: 1})),
        "tp2 etp2": ("canonical", losses("canonical", **{TP: 2, SP: True, ETP: 2})),
        "decomposed": ("dora", losses("dora", **{TP: 2, SP: True, ETP: 2})),
    }
""",
    )
    for name, (kind, found) in results[0].items():
        assert found == pytest.approx(losses[kind], abs=1e-5), name


def test_checkpoints(launch):
    """They hold adapters alone, and are resumed bit-equal, or in another layout, which may merge them too."""
    results, _ = launch(
        2,
        SHARED
        + """
def resumes(name, kind="lora", **model):
    return resumes_bit_equal(
        name,
        **SMALL,
        model={**MOE, **BIASED, **model},
        peft=KINDS[kind],
        checkpoint={"pretrained_checkpoint": "base", "dist_ckpt_optim_fully_reshardable": True},
        optimizer={"use_distributed_optimizer": True},
    )["same"]

def moved(name, kind, one, other):  # next losses of adapters saved in one layout, resumed in another, and merged there
    run = adapted(kind, {"save": name}, **BIASED, **one)
    run.train(2)
    run.save()
    step, losses = run.state.train_state.step, run.train(2)
    loaded = adapted(kind, {"load": name}, **BIASED, **other)
    loaded.load()
    resumed = loaded.train(2)
    loaded.load()
    save_merged(loaded.state, loaded.model, f"merged {name}")
    plain = start(**SMALL, model={**MOE, **BIASED}, checkpoint={"pretrained_checkpoint": f"merged {name}"})
    plain.load()
    plain.state.train_state.step = step
    return losses, resumed, plain.train(1)[0]

BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
KINDS["experts"] = {**LORA, "target_modules": ["*.local_experts.*.linear_fc*", "linear_proj"], "dropout": 0.1}

def scenario():
    base = start(**SMALL, model={**MOE, **BIASED}, checkpoint={"save": "base"})
    base.train(1)
    base.save()
    results = {
        "bit equal": [*resumes("ep2", "experts", **{EP: 2}), *resumes("pp2", hidden_dropout=0.1, **{PP: 2})],
        "moved": {
            name: moved(name, *case)
            for name, case in {
                "lora to tp2": ("lora", {EP: 2}, {TP: 2, SP: True, ETP: 2}),
                "lora to dp2": ("lora", {EP: 2}, {}),
                "canonical to pp2": ("canonical", {TP: 2, SP: True, EP: 2, ETP: 1}, {PP: 2}),
                "canonical to ep2": ("canonical", {TP: 2, SP: True, EP: 2, ETP: 1}, {EP: 2}),
                "dora": ("dora", {PP: 2}, {TP: 2, SP: True, ETP: 2}),
            }.items()
        },
    }
    keys = FileSystemReader("pp2/iter_0000002").read_metadata().state_dict_metadata
    names = [key for key in keys if key.startswith(("decoder.", "embedding.", "output_layer."))]
    results["others"] = sorted(key for key in names if ".adapter." not in key)
    plain, other = adapted(checkpoint={"load": "base"}, **BIASED), adapted("dora", {"load": "pp2"}, **BIASED)
    results["refused"] = [refusal(each) for each in (plain, other)]
    results["refused"].append(refusal(start(**SMALL, model={**MOE, **BIASED}, checkpoint={"load": "pp2"})))
    return results
""",
    )
    for result in results:
        assert result["bit equal"] == [True] * 6
        for name, (losses, resumed, merged) in result["moved"].items():
            assert resumed == pytest.approx(losses, abs=1e-5), name
            assert merged == pytest.approx(losses[0], abs=1e-5), name
    assert all(key.endswith(".mlp.router.expert_bias") for key in results[0]["others"])
    without, other, plain = results[0]["refused"]
    assert "is a checkpoint without adapters; use it as pretrained_checkpoint" in without
    assert "its adapters have kind 'LoRA', this run's peft 'DoRA'" in other
    assert "is not in it" in plain
