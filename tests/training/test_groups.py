"""What Megatron-Core is given to make its groups, and groups of a grid of ranks, handed to it function by function.

The settings of NCCL have no effect without GPUs.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.golden import Sentence

torch = pytest.importorskip("torch")

from megatron.core import parallel_state as mpu  # noqa: E402

from cloudai_mbridge.recipes.container import container_data  # noqa: E402
from cloudai_mbridge.training import initialize  # noqa: E402
from cloudai_mbridge.training.config import ConfigContainer, DistributedInitConfig  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.process.device import bind_local_device  # noqa: E402
from cloudai_mbridge.training.process.groups import embedding_ranks, set_flight_recorder  # noqa: E402
from cloudai_mbridge.training.startup import unsupported  # noqa: E402
from cloudai_mbridge.training.startup.prepare import adapt_to_device  # noqa: E402
from tests.training.conftest import Finished, Train  # noqa: E402

SETTINGS: dict[str, Any] = {
    "use_sharp": True,
    "sharp_enabled_group": "dp_replica",
    "nccl_communicator_config_path": "nccl.yaml",
    "high_priority_stream_groups": ["ep", "dp_cp"],
    "distributed_timeout_minutes": 7,
}

GRID = {"use_decentralized_pg": True, "use_gloo_process_groups": False}
SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32}
STAGES = {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "expert_model_parallel_size": 2}


def test_settings_of_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    make = mock.create_autospec(mpu.initialize_model_parallel)
    monkeypatch.setattr(mpu, "initialize_model_parallel", make)
    monkeypatch.setattr(mpu, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 1)
    for name in ("_seed_generators", "count_micro_batches", "start_user_buffers"):
        monkeypatch.setattr(initialize, name, mock.Mock())
    monkeypatch.setattr(initialize.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(initialize, "current_device", lambda: torch.device("cuda"))
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 32}
    train = {"train_iters": 2, "micro_batch_size": 3, "global_batch_size": 6}
    sections = {"model": model, "train": train, "optimizer": {"lr": 1e-3}, "dist": SETTINGS}
    config = ConfigContainer.from_dict(container_data(sections))
    monkeypatch.setattr(unsupported, "_lacking", set)
    unsupported.refuse_unsupported(config)
    config.model.hierarchical_context_parallel_sizes = [2, 2]
    initialize.initialize_megatron(config)
    (call,) = make.call_args_list
    assert call.kwargs.items() >= {**SETTINGS, "hierarchical_context_parallel_sizes": [2, 2]}.items()
    initialize.start_user_buffers.assert_called_once_with(config.model, 3)


@pytest.mark.parametrize(("sees_one", "device"), [(False, 3), (True, 0)])
def test_a_launcher_may_show_each_process_one_gpu(monkeypatch: Any, sees_one: bool, device: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", taken := mock.Mock())
    bind_local_device("nccl", sees_one=sees_one)
    taken.assert_called_once_with(device)


def test_the_flight_recorder_yields_to_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    config = DistributedInitConfig(flight_recorder_trace_buffer_size=7)
    env: dict[str, str] = {}
    set_flight_recorder(config, env)
    assert env == {}, "no path, no recorder"
    config.flight_recorder_dump_path = "dumps/rank"
    env["TORCH_INCLUDE_STACK_TRACE"] = "1"
    set_flight_recorder(config, env)
    assert env == {
        "TORCH_FR_DUMP_TEMP_FILE": "dumps/rank",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "dumps/rank",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_INCLUDE_STACK_TRACE": "1",
        "TORCH_INCLUDE_ONLY_ACTIVE": "1",
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1",
    }
    assert [record.args[0] for record in caplog.records] == ["TORCH_INCLUDE_STACK_TRACE"]
    env = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "theirs"}
    set_flight_recorder(config, env)
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "theirs"


@pytest.mark.kept_ranks
@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [{**STAGES, "tensor_model_parallel_size": 2}, {**EXPERTS, "context_parallel_size": 2}],
    ids=["tp2-pp2", "cp2-ep2"],
)
def test_the_losses_of_global_groups(train: Train, layout: dict[str, Any]) -> None:
    """Also in a run that goes on with the other groups."""
    checkpoint = {"save": "ckpt", "load": "ckpt"}
    sections = {
        "model": {**SMALL, **layout},
        "train": {"train_iters": 4, "exit_interval": 2, "micro_batch_size": 1, "global_batch_size": 4},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-2, "use_distributed_optimizer": True},
    }
    whole = train(4, {**sections, "train": {**sections["train"], "exit_interval": 4}})
    first = train(4, {**sections, "checkpoint": checkpoint, "dist": GRID})
    assert first.losses | train(4, {**sections, "checkpoint": checkpoint}).losses == whole.losses
    assert first.records[1]["grad_norm"] == whole.records[1]["grad_norm"]


@pytest.mark.process
def test_groups_share_a_device_of_gloo(ranks: Callable[..., Finished]) -> None:
    """Each device has a thread that wakes a hundred times a second, and Megatron-Core makes some thirty groups."""
    script = """
    import os
    from pathlib import Path
    from cloudai_mbridge.training import cpu
    import torch.distributed as dist

    def loops():
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return links.count("anon_inode:[eventpoll]")

    cpu.install()
    dist.init_process_group("gloo")
    before = loops()
    for group in [dist.new_group([0, 1]) for _ in range(8)]:
        dist.barrier(group)
    os.write(1, f"{before > 0} {loops() - before}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    """
    assert ranks(2, script).stdout.splitlines() == ["True 0"] * 2


def test_what_the_grid_has_no_settings_for(tiny: Any, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr(unsupported, "_lacking", set)
    config = ConfigContainer.from_dict(tiny({"dist": GRID}))
    unsupported.refuse_unsupported(config)
    config.dist.use_tp_pp_dp_mapping = config.dist.use_sharp = True
    with pytest.raises(ConfigError, match=r"dist.use_tp_pp_dp_mapping") as caught:
        unsupported.refuse_unsupported(config)
    sentence(caught)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, [4, 6]),
        ({"share_embeddings_and_output_weights": False}, [4]),
        ({"share_embeddings_and_output_weights": False, "mtp_num_layers": 1}, [4, 6]),
        (
            {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tm|L", "pipeline_model_parallel_size": 3},
            [4, 5, 6],
        ),
    ],
)
def test_the_ranks_that_hold_the_word_embeddings(given: dict[str, Any], ranks: list[int], tiny: Any) -> None:
    config = ConfigContainer.from_dict(tiny({"model": {**SMALL, "share_embeddings_and_output_weights": True, **given}}))
    adapt_to_device(config, has_gpu=False)
    config.model.finalize()
    assert embedding_ranks(config.model, [4, 5, 6]) == ranks
    assert embedding_ranks(object(), [4, 5, 6]) == [4, 6], "a model of the user's own is taken to be tied"
