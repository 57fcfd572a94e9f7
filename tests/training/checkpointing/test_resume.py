"""Resume: bit-equal in the same layout, within rounding in another one."""

import pytest


def test_one_process(launch):
    (results,), out = launch(
        1,
        """
def scenario():
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    results = {
        "plain": resumes_bit_equal("plain"),
        "dropout": resumes_bit_equal("dropout", model=dropout),
        "bf16": resumes_bit_equal("bf16", model={"dtype": "bf16", **dropout}),
        "sgd": resumes_bit_equal("sgd", optimizer={"optimizer": "sgd", "sgd_momentum": 0.9}),
        "before any step": resumes_bit_equal("zero", before=0),
    }
    # the pieces that can be left out
    run = start(checkpoint={"load": "dropout", "load_rng": False, "load_optim": False})
    run.load()
    steps = {state.get("step", 0) for state in run.optimizer.chained_optimizers[0].optimizer.state.values()}
    results["left out"] = [float(s) for s in steps]
    results["scratch"] = [start(checkpoint={"load": "nowhere"}).load(), start().load()]
    return results
""",
    )
    for name in ("plain", "dropout", "bf16"):
        assert results[name] == {"position": [2, 2e9], "same": [True] * 3, "is_fused": True, "samples": 16}, name
    assert results["sgd"]["same"] == [True] * 3
    assert results["before any step"]["same"] == [True] * 3
    assert results["left out"] in ([], [0.0])  # the optimizer starts afresh
    assert results["scratch"] == [[0, 0], [0, 0]]
    assert "no checkpoint found in nowhere: training starts from scratch" in out


def test_two_ranks(launch):
    """Data parallel with both optimizers and both ways to cut up the distributed one's state; asynchronous saves."""
    results, _ = launch(
        2,
        """
def scenario():
    sharded = {"optimizer": {"use_distributed_optimizer": True}}
    fully = {"dist_ckpt_optim_fully_reshardable": True}
    bf16 = {"model": {"dtype": "bf16"}}
    return {
        "dp2": resumes_bit_equal("dp2", model={"hidden_dropout": 0.1}),
        "sharded": resumes_bit_equal("sharded", **sharded),
        "sharded before any step": resumes_bit_equal("zero", before=0, **sharded),
        "fully": resumes_bit_equal("fully", **sharded, checkpoint=fully),
        "bf16": resumes_bit_equal("bf16", **sharded, **bf16, checkpoint={"fully_parallel_load": True}),
        "one writer": resumes_bit_equal("one", **sharded, checkpoint={"fully_parallel_save": False}),
        "async": resumes_bit_equal("async", **sharded, checkpoint={"async_save": True}),
        "tp2": resumes_bit_equal("tp2", model={"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}),
    }
""",
    )
    for result in results:
        for name, one in result.items():
            assert one["same"] == [True] * 3, name
            assert one["is_fused"], name


@pytest.mark.long
def test_tensor_and_pipeline_parallel(launch):
    results, _ = launch(
        4,
        """
def scenario():
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "hidden_dropout": 0.1}
    return resumes_bit_equal("ckpt", model=layout)
""",
    )
    assert [result["same"] for result in results] == [[True] * 3] * 4


@pytest.mark.long
def test_another_layout(launch):
    results, out = launch(
        2,
        """
def scenario():
    tp2 = {"model": {"tensor_model_parallel_size": 2}}
    pp2 = {"model": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}}
    sharded = {"optimizer": {"use_distributed_optimizer": True}}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
    ep1, ep2 = {"model": experts}, {"model": {**experts, "expert_model_parallel_size": 2}}
    differences = {
        "tp2 to dp2": difference_after("a", tp2, {}),
        "tp2 to pp2": difference_after("b", tp2, pp2),
        "sharded tp2 to dp2": difference_after("c", {**tp2, **sharded}, sharded),
        "sharded dp2 to pp2": difference_after("d", sharded, {**pp2, **sharded}),
        "ep2 to ep2": difference_after("e", ep2, ep2),
        "ep2 to ep1": difference_after("f", ep2, ep1),
        "sharded ep1 to ep2": difference_after("g", {**ep1, **sharded}, {**ep2, **sharded}),
        "sharded to not": difference_after("h", sharded, {}),
    }
    # state of the distributed optimizer that was saved for one layout
    run = start(**tp2, **sharded, checkpoint={"save": "one_layout"})
    run.train(1)
    run.save()
    other = start(**sharded, checkpoint={"load": "one_layout"})
    weights = start(**sharded, checkpoint={"load": "one_layout", "load_optim": False})
    return differences, refusal(other), weights.load()
""",
    )
    for differences, message, position in results:
        assert max(differences.values()) < 1e-4, differences
        assert message.startswith("one_layout/iter_0000001: ")
        assert "(tp 2 -> 1" in message
        assert "checkpoint.dist_ckpt_optim_fully_reshardable=True" in message
        assert position == [1, 1e9]
    assert "random number generator states are not loaded" in out


def test_another_learning_rate(launch):
    """It is refused, trained with, or gives way to the checkpoint's, whatever the release of Megatron-Core."""
    results, _ = launch(
        2,
        """
def rates(run):
    run.train(1)
    return {group[key] for part in run.optimizer.chained_optimizers for group in part.optimizer.param_groups
            for key in ("max_lr", "lr")}

def scenario():
    results = {}
    for name, sharded in (("plain", False), ("sharded", True)):
        kind = {"use_distributed_optimizer": sharded}
        same = {"lr_warmup_iters": 0, "lr_decay_style": "constant"}
        places = {"save": name, "load": name}
        first = start(optimizer=kind, scheduler=same, checkpoint=places)
        first.train(1)
        first.save()
        other = {"optimizer": {**kind, "lr": 0.5}, "checkpoint": {"load": name}}
        overridden = start(**other, scheduler={**same, "override_opt_param_scheduler": True})
        overridden.load()
        results[name] = [sorted(rates(overridden))]
        theirs = start(**other, scheduler={**same, "use_checkpoint_opt_param_scheduler": True})
        theirs.load()
        results[name] += [sorted(rates(theirs))]
        results[name] += [refusal(start(**other, scheduler=same))]
    return results
""",
    )
    for result in results:
        for name, (overridden, theirs, refused) in result.items():
            assert overridden == [0.5], name
            assert theirs == [0.01], name
            assert "learning rate" in refused, name
