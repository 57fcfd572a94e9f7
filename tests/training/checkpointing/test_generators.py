"""Random number generators in checkpoints: which forms are read, and what the log contains where none is restored."""

DRAWS = """
def draws():
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]
"""


def test_data_parallel_ranks_whose_generators_differ_each_get_their_own(launch):
    """As after dropout in batches of different lengths: Megatron-Bridge would give all of them the first rank's."""
    results, _ = launch(
        2,
        DRAWS
        + """
def scenario():
    run = start(checkpoint={"save": "own", "load": "own"})
    torch.rand(1 + dist.get_rank())
    run.save()
    before = draws()
    start(checkpoint={"load": "own"}).load()
    return before, draws()
""",
    )
    assert [before for before, _ in results] == [after for _, after in results]
    assert results[0] != results[1]


def test_the_form_of_megatron_bridge(launch):
    """One part for each (pp, tp), of one state where the replicas agree; with experts over ranks one for each rank."""
    results, _ = launch(
        2,
        """
from cloudai_mbridge.training.checkpointing import generators

def scenario():
    experts = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "expert_model_parallel_size": 2}
    found = {}
    for name, model in {"dp2": {}, "tp2": {"tensor_model_parallel_size": 2}, "ep2": experts}.items():
        run = start(model=model, checkpoint={"save": name, "load": name})
        run.save()
        part = generators.states_to_save()
        directory = f"{name}/iter_0000000"
        found[name] = [generators.saved_shape(directory), part.global_offset, part.replica_id, len(part.data)]
    return [found, sorted(part.data[0])]
""",
    )
    keys = ["cuda_rng_state", "np_rng_state", "random_rng_state", "rng_tracker_states", "torch_rng_state"]
    for rank, (found, names) in enumerate(results):
        assert names == keys
        assert found["dp2"] == [[1, 1], [0, 0], rank, 1]
        assert found["tp2"] == [[1, 2], [0, rank], 0, 1]
        assert found["ep2"] == [[1, 1, 2], [0, 0, rank], 0, 1]


def test_our_older_form_resumes(launch):
    results, out = launch(
        2,
        DRAWS
        + """
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from cloudai_mbridge.training.checkpointing.content import content_metadata, tree_to_save

def older():
    kind, keys, *rest = np.random.get_state()
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (str(kind), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch_rng_state": torch.get_rng_state(),
        "device_rng_state": None,
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),))

def scenario():
    run = start(checkpoint={"save": "older", "load": "older"})
    torch.rand(3)
    parts = (run.model, run.optimizer, run.scheduler, 0.0, None)
    tree = tree_to_save(run.state, *parts, content_metadata(run.state.cfg.checkpoint))
    tree |= {"rng_state": older(), "rerun_state_machine": None}
    save_checkpoint(run.state, *parts[:4], run.context, prebuilt_state_dict=tree)
    before = draws()
    start(checkpoint={"load": "older"}).load()
    after = draws()
    start(model={"tensor_model_parallel_size": 2}, checkpoint={"load": "older"}).load()
    return before, after
""",
    )
    for before, after in results:
        assert before == after
    assert "states are not loaded: the parallelism differs from the checkpoint's)" in out


def test_what_the_log_contains_where_something_is_not_restored(launch):
    """Saved without generators: Megatron-Core would refuse the missing key. Without the optimizer the law restarts."""
    (result,), out = launch(
        1,
        """
def scenario():
    start(checkpoint={"save": "bare", "save_rng": False, "save_optim": False}).save()
    refused = refusal(start(checkpoint={"load": "bare"}))
    return refused, start(checkpoint={"load": "bare", "load_optim": False}).load()
""",
    )
    refused, position = result
    assert refused.endswith("holds no optimizer state; set checkpoint.load_optim=False")
    assert position == [0, 0]
    assert "(random number generator states are not loaded: the checkpoint contains none)" in out
    assert "(the state of the optimizer is not loaded: the learning-rate law begins anew as well)" in out


def test_another_layout_is_named_without_an_entry_of_ours(launch):
    """Megatron-Bridge saves none: the layout is read from its run_config.yaml."""
    results, out = launch(
        2,
        """
from cloudai_mbridge.training.checkpointing.content import content_metadata, tree_to_save

def scenario():
    sharded = {"optimizer": {"use_distributed_optimizer": True}}
    run = start(model={"tensor_model_parallel_size": 2}, **sharded, checkpoint={"save": "theirs"})
    run.train(1)
    parts = (run.model, run.optimizer, run.scheduler, 0.0, None)
    tree = tree_to_save(run.state, *parts, content_metadata(run.state.cfg.checkpoint))
    del tree["parallelism"]
    save_checkpoint(run.state, *parts[:4], run.context, prebuilt_state_dict=tree)
    refused = refusal(start(**sharded, checkpoint={"load": "theirs"}))
    return refused, start(**sharded, checkpoint={"load": "theirs", "load_optim": False}).load()
""",
    )
    for refused, position in results:
        assert "(tp 2 -> 1" in refused
        assert refused.endswith("or set checkpoint.load_optim=False")
        assert position[0] == 1
    assert "not loaded: they were saved for pp 1, tp 2, and this run has pp 1, tp 1)" in out
