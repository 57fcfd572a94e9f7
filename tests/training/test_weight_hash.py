"""Replicas whose weights differ by one bit are found, on the ranks that replicate them and no others."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

# 4 ranks, several layouts one after another; every rank says its verdict per case.
SCRIPT = """
    import torch
    import torch.distributed as dist
    from cloudai_mbridge.training import cpu

    cpu.install()
    from megatron.core import parallel_state as mpu
    from cloudai_mbridge.training.process.log_lines import write_line
    from cloudai_mbridge.training.loop.between_steps import check_param_hashes_across_dp_replicas

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    class Chunk(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, dtype in (("f32", torch.float32), ("f64", torch.float64), ("bf16", torch.bfloat16)):
                self.register_parameter(name, torch.nn.Parameter(torch.arange(12, dtype=dtype).view(3, 4).t()))
            self.scalar = torch.nn.Parameter(torch.tensor(1.0))
            self.expert = torch.nn.Parameter(torch.full((4,), float(mpu.get_expert_model_parallel_rank())))
            self.expert.allreduce = False

    def flip_lowest_bit(param):
        data = param.data.contiguous()
        bits = data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
        bits.view(-1)[-1] ^= 1
        param.data = data

    def case(name, change=lambda model: None, on=()):
        model = [Chunk(), Chunk()]
        if rank in on:
            change(model)
        with cpu.megatron_device():
            verdict = check_param_hashes_across_dp_replicas(model)
        write_line(f"{name} rank {rank}: {verdict}")

    def layout(**sizes):
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(**sizes)

    layout()
    case("equal")
    for name in ("f32", "f64", "bf16", "scalar", "expert"):
        case(name, lambda model: flip_lowest_bit(getattr(model[1], name)), on=[2])
    case("minus zero", lambda model: model[0].f32.data[0, 0].neg_(), on=[1])
    case("all but one", lambda model: flip_lowest_bit(model[0].f32), on=[1, 2, 3])
    layout(expert_model_parallel_size=2)
    case("other experts per rank")
    case("expert replica", lambda model: flip_lowest_bit(model[0].expert), on=[3])
    case("every expert of a shard", lambda model: flip_lowest_bit(model[0].expert), on=[1, 3])
    layout(context_parallel_size=2)
    case("context ranks are replicas", lambda model: flip_lowest_bit(model[0].f32), on=[1])
    layout(tensor_model_parallel_size=2)
    case("tensor ranks are none", lambda model: flip_lowest_bit(model[0].f32), on=[1, 3])
    layout(tensor_model_parallel_size=4)
    case("no replicas", lambda model: flip_lowest_bit(model[0].f32), on=[1])
    dist.destroy_process_group()
"""

EQUAL = {"equal", "other experts per rank", "every expert of a shard", "tensor ranks are none", "no replicas"}
DIFFERENT = {
    *("f32", "f64", "bf16", "scalar", "expert", "minus zero", "all but one"),
    *("expert replica", "context ranks are replicas"),
}


def test_one_bit_of_one_replica_is_found(ranks: Callable[..., Any]) -> None:
    lines = ranks(4, SCRIPT).stdout.splitlines()
    verdicts = {line for line in lines if line.endswith(("True", "False"))}
    expected = dict.fromkeys(EQUAL, True) | dict.fromkeys(DIFFERENT, False)
    assert verdicts == {f"{name} rank {rank}: {verdict}" for name, verdict in expected.items() for rank in range(4)}
    named = [line for line in lines if "weights differ" in line]
    first = "weights differ from those of the first replica"
    assert f"rank 2: {first}: chunk 1: bf16" in named
    assert f"rank 3: {first}: chunk 0: expert" in named
    assert len(named) == len(DIFFERENT) + 2  # one line per rank that differs; three ranks in "all but one"
