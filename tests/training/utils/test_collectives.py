"""Reductions, norms of DTensors, the value head and the auxiliary losses' report, on two ranks."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.process.device import reduce_max_memory_across_pp_group
from tests.cases import every

SCRIPT = """
import json, math
import torch, torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from types import SimpleNamespace
from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.utils import train_utils as t
from cloudai_mbridge.training.reporting.training_log import track_auxiliary_losses

def save_mtp_loss(loss, **groups):
    if hasattr(MTPLossLoggingHelper, "save_loss_to_tracker"):
        MTPLossLoggingHelper.save_loss_to_tracker(loss, 0, 1, **groups)
    else:  # since 0.19 it counts right predictions too
        MTPLossLoggingHelper.save_metrics_to_tracker(loss, torch.tensor(0.0), torch.tensor(1.0), 0, 1, **groups)

cpu.install()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD
found = {}

def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

reduce = t.reduce_max_stat_across_model_parallel_group
found["max"] = [
    reduce(stats[rank], world)
    for stats in [
        (None, 3), (3, None), (None, None), (-1.0, None), (-1.0, -1.0), (-5.0, -2.5), (math.nan, 1.0), (0, 1e-300)
    ]
]
found["and"] = [
    t.logical_and_across_model_parallel_group(flags[rank], world)
    for flags in [(True, True), (True, False), (False, True), (1, True), (0, 1)]
]
report = {"a": 1 + rank, "b": 2.5 - rank, "c": True}
found["memory"] = t.reduce_max_memory_across_pp_group(report, world)
found["memory types"] = [type(value).__name__ for value in found["memory"].values()]
found["memory is new"] = t.reduce_max_memory_across_pp_group(report, world) is not report
found["empty memory"] = t.reduce_max_memory_across_pp_group({}, world)

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
full, other = torch.randn(5, 3), torch.randn(1, 4)  # rank 1 holds nothing of the second
sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (full, other)]
replica = distribute_tensor(torch.full((7,), 2.0), mesh, [Replicate()])
definition = math.sqrt(sum(each.square().sum().item() for each in (full, other)) + 28)
found["dtensor"] = [t.calc_dtensor_params_l2_norm([*sharded, replica]), definition]
partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
found["partial"] = raised(lambda: t.calc_dtensor_params_l2_norm([partial]))

with cpu.megatron_device():
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    plain = torch.nn.Linear(2, 2)
    found["fsdp"] = raised(lambda: t.calc_params_l2_norm([plain], SimpleNamespace(), use_megatron_fsdp=True))
    dense = torch.nn.Module()
    dense.weight = torch.nn.Parameter(sharded[0])
    found["fsdp norm"] = [t.calc_params_l2_norm([dense], SimpleNamespace(), use_megatron_fsdp=True), full.norm().item()]

    # The value head: the whole sequence on every rank, gradients of the weight to be summed, of the input not
    torch.manual_seed(1)
    whole, weight, wanted = torch.randn(6, 2, 4), torch.randn(3, 4), torch.randn(6, 2, 3)
    one = t.LinearForLastLayer(4, 3, False)
    two = t.LinearForLastLayer(4, 3, True)
    for head in (one, two):
        head.weight.data.copy_(weight)
    x1, x2 = whole.clone().requires_grad_(), whole.chunk(2)[rank].clone().requires_grad_()
    y1, y2 = one(x1)[0], two(x2, weight=torch.zeros(3, 4), runtime_gather_output=True)[0]
    (y1 * wanted).sum().backward()
    (y2 * wanted).sum().backward()
    summed = two.weight.grad.clone()
    dist.all_reduce(summed)
    found["head"] = [
        list(y2.shape), torch.allclose(y1, y2, atol=1e-6), torch.allclose(x2.grad, x1.grad.chunk(2)[rank]),
        torch.allclose(summed, one.weight.grad, atol=1e-6), two.weight.sequence_parallel,
    ]
    only_mtp, means = SimpleNamespace(mtp_num_layers=1), {}
    save_mtp_loss(torch.tensor(float(rank)), avg_group=world)
    track_auxiliary_losses(only_mtp, 1, 1, [None] * 4, means)
    found["mean over replicas"] = float(means["mtp_1 loss"])
    MTPLossLoggingHelper.tracker.clear()
    mpu.destroy_model_parallel()

    # Stages without routers take part in the sum over stages; a second stage has layer 3's router only
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    found["flags"] = [chunk.output_layer.__class__.__name__ for chunk in t.make_value_model(4, False)(
        [SimpleNamespace(output_layer=None)])]
    config = SimpleNamespace(
        num_moe_experts=4, moe_router_load_balancing_type="seq_aux_loss", moe_z_loss_coeff=1e-3, num_layers=4,
        moe_layer_freq=[0, 0, 1, 0], moe_per_layer_logging=True, mtp_num_layers=1,
    )
    written = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: written.append((name, float(value), step)))
    to_wandb = {}
    wandb = SimpleNamespace(log=lambda values, step: to_wandb.update({n: float(v) for n, v in values.items()}))
    totals = {}
    for step in (1, 2):
        if rank == 1:
            for loss in (2.0, 4.0):  # two micro-batches
                save_to_aux_losses_tracker("seq_load_balancing_loss", torch.tensor(loss), 3, 5)
                save_to_aux_losses_tracker("z_loss", torch.tensor(1.0), 3, 5)
                save_mtp_loss(torch.tensor(loss))
        track_auxiliary_losses(config, 2, step, [None if step == 1 else writer, wandb, None, None], totals)
    found["aux"] = {name: float(value) for name, value in totals.items()}
    found["written"], found["wandb"] = written, to_wandb
    mpu.destroy_model_parallel()
every = [None, None]
dist.all_gather_object(every, found)
if rank == 0:
    print("RESULT " + json.dumps(every))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run_once() -> dict[str, Any]:
    return {}


@pytest.fixture
def found(run_once: dict[str, Any], ranks: Callable[..., Any]) -> list[dict[str, Any]]:
    """What each of the two ranks has found; they are started once."""
    if "found" not in run_once:
        out = ranks(2, SCRIPT).stdout
        run_once["found"] = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    every: list[dict[str, Any]] = run_once["found"]
    return every


def test_the_greatest_value_of_the_ranks(found: Any) -> None:
    for rank in found:
        *values, nan, tiny = rank["max"]
        assert values == [3, 3, None, -1.0, -1.0, -2.5]
        assert math.isnan(nan)
        assert tiny == 1e-300


def test_true_on_every_rank(found: Any) -> None:
    assert [rank["and"] for rank in found] == [[True, False, False, True, False]] * 2


def test_the_greatest_memory_of_the_stages(found: Any) -> None:
    for rank in found:
        assert rank["memory"] == {"a": 2, "b": 2.5, "c": 1.0}
        assert rank["memory types"] == ["int", "float", "float"]
        assert rank["memory is new"]
        assert rank["empty memory"] == {}


def test_the_norm_of_dtensors(found: Any) -> None:
    for rank in found:
        norm, definition = rank["dtensor"]
        assert norm == pytest.approx(definition, rel=1e-6)
        assert rank["partial"].startswith("RuntimeError: ")
        assert rank["fsdp"].startswith("RuntimeError: Megatron-FSDP is on, and 2 parameters are not DTensors")
        norm, definition = rank["fsdp norm"]
        assert norm == pytest.approx(definition, rel=1e-6)


def test_the_value_head_with_sequence_parallelism(found: Any) -> None:
    assert [rank["head"] for rank in found] == [[[6, 2, 3], True, True, True, True]] * 2


def test_only_the_last_stage_gets_a_value_head(found: Any) -> None:
    assert [rank["flags"] for rank in found] == [["NoneType"], ["LinearForLastLayer"]]


def test_the_auxiliary_losses(found: Any) -> None:
    """Sums over two steps of means over two micro-batches: of one MoE layer, which two layers share with MTP's."""
    first, last = found
    assert first["mean over replicas"] == last["mean over replicas"] == 0.5
    assert last["aux"] == {
        "load_balancing_loss": 0.0,
        "seq_load_balancing_loss": 2 * 3.0 / 2,
        "z_loss": 2 * 1.0 / 2,
        "mtp_1 loss": 2 * 3.0,
    }
    assert first["aux"] == {name: value for name, value in last["aux"].items() if name != "mtp_1 loss"}
    written = {name: value for name, value, step in last["written"]}
    assert written["z_loss"] == 0.5
    assert written["mtp_1 loss"] == 3.0
    assert written["moe/seq_load_balancing_loss_layer_2"] == 3.0
    assert {step for _, _, step in last["written"]} == {2}
    assert last["wandb"] == {name: written[name] for name in last["wandb"]}
    assert {"z_loss", "mtp_1 loss", "seq_load_balancing_loss"} <= set(last["wandb"])


@every("group", [None, SimpleNamespace(), SimpleNamespace(size=4), SimpleNamespace(size=lambda: 1)])
def test_a_memory_report_that_nobody_shares(group: Any) -> None:
    report: dict[str, int | float] = {"a": 1}
    assert reduce_max_memory_across_pp_group(report, group) is report
