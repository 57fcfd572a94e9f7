"""The three loss patterns through Megatron's schedules, with unequal token counts: values and gradients by hand.

The model is a product of two weights per feature: token t of micro-batch k on rank r has the loss
sum_h x[r, k, t, h] * w0[h] * w1[h], so every gradient is known in closed form. r counts the ranks that data or context
parallelism makes; the reference is computed here, without torch.
"""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")

MASKS = [[[1, 0, 0, 0], [1, 1, 1, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]]]  # [rank][micro-batch][token]: 1, 3; 2, none
W0, W1 = [0.5, -1.0, 2.0, 0.25], [1.5, 0.5, -0.75, 3.0]
MICRO_BATCHES, TOKENS, HIDDEN = 2, 4, 4

SCRIPT = """
import itertools, json, sys
from functools import partial
import torch, torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.distributed import (
    DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.losses import masked_next_token_loss
from cloudai_mbridge.training.step import reduce_losses

MASKS, W0, W1 = (torch.tensor(each) for each in json.loads(sys.argv[1]))
M, S, H = 2, 4, 4


class Product(MegatronModule):
    share_embeddings_and_output_weights = False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config):
        super().__init__(config)
        self.pre_process = mpu.is_pipeline_first_stage(ignore_virtual=True)
        self.post_process = mpu.is_pipeline_last_stage(ignore_virtual=True)
        if self.pre_process:
            self.w0 = torch.nn.Parameter(W0.clone())
        if self.post_process:
            self.w1 = torch.nn.Parameter(W1.clone())

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self, x):
        hidden = x * self.w0 if self.pre_process else self.input
        return (hidden * self.w1).sum(-1).t() if self.post_process else hidden


def rank():
    return mpu.get_data_parallel_rank(with_context_parallel=True)


def batches():
    for k in range(M):
        t, h = torch.arange(S)[:, None], torch.arange(H)[None]
        yield (1 + 0.5 * rank() + 0.25 * k + 0.1 * t + 0.01 * h)[:, None], MASKS[rank()][k][None]


def standard(mask, output):
    mean = (output * mask).sum() / mask.sum().clamp(min=1)
    return mean, {"lm loss": mean.detach().clone()}


def non_loss(mask, output, non_loss_data=False):
    assert non_loss_data
    return {"sum": (output * mask).sum().item()}


LOSSES = {
    "standard": standard, "token": partial(masked_next_token_loss), "inference": non_loss, "none": None,
    "four": lambda mask, output: (output.sum(), 1, 2, 3),
    "triple": lambda mask, output: (output.sum(), mask.sum().int(), {"lm loss": torch.ones(3)}),
}


def run(pattern, layout, per_token):
    config = TransformerConfig(
        num_layers=2, hidden_size=H, num_attention_heads=1, use_cpu_initialization=True,
        calculate_per_token_loss=per_token, pipeline_dtype=torch.float32, deallocate_pipeline_outputs=False,
        finalize_model_grads_func=finalize_model_grads, gradient_accumulation_fusion=False, **layout,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Product(config))
    model.zero_grad_buffer()

    def step(iterator, chunk):
        x, mask = next(iterator)
        return chunk(x), LOSSES[pattern] and partial(LOSSES[pattern], mask)

    is_inference = pattern in ("inference", "none")
    error = value = None
    try:
        data = get_forward_backward_func()(
            forward_step_func=step, data_iterator=batches(), model=[model], num_microbatches=M, seq_length=S,
            micro_batch_size=1, forward_only=is_inference, collect_non_loss_data=pattern == "inference",
        )
        value = data if is_inference else {key: float(each) for key, each in reduce_losses(data).items()}
    except (AssertionError, ValueError) as failure:
        error = type(failure).__name__ + ": " + str(failure)
    if pattern == "none":
        value = [output.flatten().tolist() for output in data]
    grads = {name: p.main_grad.tolist() for name, p in model.module.named_parameters()}
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"value": value, "grads": grads, "error": error})
    return found


def run_all(cases):
    for layout, same in itertools.groupby(cases, lambda case: case["layout"]):
        mpu.initialize_model_parallel(**layout)
        for case in same:
            yield run(**case)
        mpu.destroy_model_parallel()


if __name__ == "__main__":
    import os
    cpu.install()
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu.megatron_device():
        found = list(run_all(json.loads(sys.argv[2])))
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
"""

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
PATTERNS = ("standard", "token", "inference")


def _cases(names: list[str]) -> list[dict[str, Any]]:
    wanted = product(names, PATTERNS, (False, True))
    return [
        {"pattern": pattern, "layout": LAYOUTS[name], "per_token": per_token}
        for name, pattern, per_token in wanted
        if pattern == "token" or not per_token
    ]


def _run(ranks: Callable[..., Any], processes: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    done = ranks(processes, SCRIPT, json.dumps([MASKS, W0, W1]), json.dumps(cases))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: list[list[dict[str, Any]]] = json.loads(line.removeprefix("FOUND "))
    return found


# ---- by hand


def _x(rank: int, k: int, t: int, h: int) -> float:
    return 1 + 0.5 * rank + 0.25 * k + 0.1 * t + 0.01 * h


def _masked_x(rank: int, k: int, h: int) -> float:
    return sum(_x(rank, k, t, h) for t in range(TOKENS) if MASKS[rank][k][t])


def _sum(rank: int, k: int) -> float:
    return sum(_masked_x(rank, k, h) * W0[h] * W1[h] for h in range(HIDDEN))


def _count(rank: int, k: int) -> int:
    return sum(MASKS[rank][k])


def _weights(pattern: str, per_token: bool, replicas: int, cp: int) -> dict[tuple[int, int], float]:
    """Return what the gradient of each micro-batch's loss sum is multiplied with in the end; `replicas` is DP x CP."""
    pairs = list(product(range(replicas), range(MICRO_BATCHES)))
    if pattern == "token" and per_token:
        return dict.fromkeys(pairs, 1 / sum(_count(*pair) for pair in pairs))
    factor = cp if pattern == "standard" else 1
    return {pair: factor / MICRO_BATCHES / replicas / max(_count(*pair), 1) for pair in pairs}


def _gradients(weights: dict[tuple[int, int], float]) -> dict[str, list[float]]:
    x = [sum(weight * _masked_x(*pair, h) for pair, weight in weights.items()) for h in range(HIDDEN)]
    return {"w0": [a * b for a, b in zip(x, W1, strict=True)], "w1": [a * b for a, b in zip(x, W0, strict=True)]}


def _value(pattern: str, replicas: int, rank: int) -> Any:
    """Return what rank `rank` (of data or context parallelism) reports."""
    mine = [(rank, k) for k in range(MICRO_BATCHES)]
    if pattern == "inference":
        return [{"sum": pytest.approx(_sum(*pair), rel=1e-5)} for pair in mine]
    if pattern == "standard":  # the mean of this rank's means
        return {"lm loss": pytest.approx(sum(_sum(*p) / max(_count(*p), 1) for p in mine) / MICRO_BATCHES, rel=1e-5)}
    everyone = list(product(range(replicas), range(MICRO_BATCHES)))
    total = sum(_sum(*pair) for pair in everyone) / sum(_count(*pair) for pair in everyone)
    return {"lm loss": pytest.approx(total, rel=1e-5)}


def _check(case: dict[str, Any], found: list[dict[str, Any]]) -> None:
    cp = case["layout"].get("context_parallel_size", 1)
    has_stages = "pipeline_model_parallel_size" in case["layout"]
    replicas = 1 if has_stages else len(found)
    pattern = case["pattern"]
    expected = _gradients(_weights(pattern, case["per_token"], replicas, cp))
    for rank, one in enumerate(found):
        is_last = not has_stages or rank == 1
        nothing: Any = [] if pattern == "inference" else {}
        assert one["error"] is None, case
        assert one["value"] == (_value(pattern, replicas, 0 if has_stages else rank) if is_last else nothing), case
        names = ["w0", "w1"] if not has_stages else [f"w{rank}"]
        assert sorted(one["grads"]) == names, case
        for name in names:
            wanted = [0.0] * HIDDEN if pattern == "inference" else expected[name]
            assert one["grads"][name] == pytest.approx(wanted, rel=1e-5), (case, name)


def test_one_process(ranks: Callable[..., Any]) -> None:
    odd = [{"pattern": name, "layout": {}, "per_token": False} for name in ("none", "four", "triple")]
    cases = _cases(["one"])
    *found, none, four, triple = _run(ranks, 1, [*cases, *odd])
    for case, each in zip(cases, found, strict=True):
        _check(case, each)
    outputs = [[sum(_x(0, k, t, h) * W0[h] * W1[h] for h in range(HIDDEN)) for t in range(TOKENS)] for k in (0, 1)]
    assert [pytest.approx(each, rel=1e-5) for each in outputs] == none[0]["value"], "appended as it is"
    assert four[0]["error"].startswith("AssertionError")
    assert "'lm loss' has shape (3,)" in triple[0]["error"]


def test_two_processes(ranks: Callable[..., Any]) -> None:
    cases = _cases(["dp2", "cp2", "pp2"])
    for case, each in zip(cases, _run(ranks, 2, cases), strict=True):
        _check(case, each)


def test_the_patterns_differ_where_the_counts_do() -> None:
    """The reference itself can tell a mean of means from a mean over tokens."""
    weights = [_weights("standard", False, 1, 1), _weights("token", True, 1, 1)]
    assert weights[0] == {(0, 0): 1 / 2, (0, 1): 1 / 6}
    assert weights[1] == {(0, 0): 1 / 4, (0, 1): 1 / 4}
    assert _weights("standard", False, 2, 2)[0, 0] == 2 * _weights("token", False, 2, 1)[0, 0]
