"""What runs beside computation changes no loss, and is refused where it would have no effect."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.config import ConfigContainer, DistributedDataParallelConfig  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.models.data_parallel import register_buffers, sized  # noqa: E402
from cloudai_mbridge.training.startup.prepare import prepare  # noqa: E402
from tests.training.conftest import Train  # noqa: E402

pytestmark = pytest.mark.process

SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "expert_model_parallel_size": 2}


def _steps(**more: Any) -> dict[str, Any]:
    return {"train_iters": 3, **more}


@pytest.mark.kept_ranks
def test_parameters_gathered_with_the_optimizer_step(train: Train) -> None:
    sections = {"train": _steps(), "model": STAGES, "optimizer": SHARDED, "ddp": {"overlap_param_gather": True}}
    sections["ddp"]["overlap_grad_reduce"] = True
    apart = train(4, sections).losses
    with_step = {**sections, "optimizer": {**SHARDED, "overlap_param_gather_with_optimizer_step": True}}
    assert train(4, with_step).losses == apart


def test_there_must_be_a_second_chunk(tiny: Any, sentence: Sentence) -> None:
    optimizer = {**SHARDED, "overlap_param_gather_with_optimizer_step": True}
    with pytest.raises(ConfigError, match="overlap_param_gather_with_optimizer_step") as caught:
        prepare(ConfigContainer.from_dict(tiny({"train": _steps(), "optimizer": optimizer})))
    sentence(caught)


@pytest.mark.kept_ranks
@pytest.mark.parametrize(
    ("processes", "layout"), [(2, {}), pytest.param(4, STAGES, marks=pytest.mark.long)], ids=["ep2", "pp2 vp2 ep2"]
)
def test_exchange_of_experts(train: Train, processes: int, layout: dict[str, Any]) -> None:
    sections = {"train": _steps(), "model": {**EXPERTS, **layout, "dtype": "bf16"}}
    apart = train(processes, sections).losses
    beside = {**sections, "model": {**sections["model"], "overlap_moe_expert_parallel_comm": True}}
    assert train(processes, beside).losses == apart


@pytest.mark.kept_ranks
def test_delayed_weight_gradients_need_transformer_engine(train: Train) -> None:
    overlap = {"tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    sections = {"train": _steps(), "model": {**EXPERTS, "dtype": "bf16"}, "comm_overlap": overlap}
    done = train(2, sections)
    assert '"comm_overlap.delay_wgrad_compute": false' in done.stdout
    assert len(done.losses) == 3


def test_one_process_alone_has_no_exchange(tiny: Any) -> None:
    model = {**EXPERTS, "expert_model_parallel_size": 1, "overlap_moe_expert_parallel_comm": True, "dtype": "bf16"}
    with pytest.raises(ConfigError, match="overlap_moe_expert_parallel_comm is only supported with expert model par"):
        prepare(ConfigContainer.from_dict(tiny({"train": _steps(), "model": model})))


SCRIPT = """
import torch
import torch.distributed as dist
from megatron.core import config as core, jit
from megatron.core import parallel_state as mpu
from cloudai_mbridge.training.callbacks import Callback
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain

class Tell(Callback):
    def on_train_step_start(self, context):
        groups = (dist.group.WORLD, mpu.get_data_parallel_group())
        timeouts = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups]
        if dist.get_rank() == 0:
            print("TOLD", timeouts, core.is_experimental_enabled(), jit.jit_fuser is jit.noop_decorator, flush=True)

pretrain(ConfigContainer.from_yaml("config.json"), forward_step, callbacks=[Tell()])
"""


def test_settings_of_the_process(ranks: Any, tiny: Any, tmp_path: Path) -> None:
    dist = {"distributed_timeout_seconds_after_init": 77, "enable_megatron_core_experimental": True}
    config = tiny({"train": _steps(), "dist": {**dist, "disable_jit_fuser": True}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = [line for line in ranks(2, SCRIPT).stdout.splitlines() if line.startswith("TOLD")]
    assert told == ["TOLD [600, 600] True True", *["TOLD [77, 77] True True"] * 2]


@every(("number", "size"), [(None, None), (3, 4), (100, 1)])
def test_number_of_buckets(number: int | None, size: int | None) -> None:
    ddp = DistributedDataParallelConfig()
    ddp.num_buckets = number  # a field since Megatron-Core 0.18
    linear = torch.nn.Linear(3, 3, bias=True)
    linear.bias.requires_grad_(False)
    assert sized(ddp, torch.nn.Sequential(linear, torch.nn.Linear(2, 1, bias=False))).bucket_size == size


@pytest.mark.parametrize(("is_manual", "registered"), [(True, 2), (False, 0)])
def test_buffers_of_megatron_fsdp_are_registered_with_nccl(is_manual: bool, registered: int) -> None:
    found: list[int] = []
    chunks = [
        SimpleNamespace(param_and_grad_buffer=SimpleNamespace(manual_buffer_registration=lambda: found.append(1)))
        for _ in range(2)
    ]
    ddp = SimpleNamespace(use_megatron_fsdp=True, fsdp_manual_registration=is_manual)
    register_buffers(SimpleNamespace(ddp=ddp), chunks)  # type: ignore[arg-type]
    assert len(found) == registered
