"""The masked loss: what it sums and reports, and what Megatron's rerun machine makes of a bad one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.losses import masked_next_token_loss, masked_token_loss  # noqa: E402
from cloudai_mbridge.verdict.triage import load_catalogue  # noqa: E402


def test_the_sum_the_count_and_the_report() -> None:
    per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    loss, tokens, report = masked_next_token_loss(mask, per_token, check_for_nan_in_loss=False)
    assert (loss.item(), tokens.item(), tokens.dtype) == (10.0, 3, torch.int)
    assert {key: value.tolist() for key, value in report.items()} == {"lm loss": [10.0, 3.0]}
    assert not report["lm loss"].requires_grad
    loss /= 5  # as Megatron's schedule does, in place
    assert report["lm loss"].tolist() == [10.0, 3.0]
    loss.backward()
    assert torch.equal(per_token.grad, mask / 5)


def test_half_precision_is_summed_in_fp32() -> None:
    per_token = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    loss, _, _ = masked_next_token_loss(torch.ones(1, 4096), per_token, check_for_nan_in_loss=False)
    assert (loss.item(), loss.dtype) == (4096.0, torch.float32)


def test_the_model_may_give_its_own_mask() -> None:
    per_token, own_mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.0, 1.0, 1.0]])
    loss, tokens, _ = masked_next_token_loss(torch.ones(1, 3), (per_token, own_mask), check_for_nan_in_loss=False)
    assert (loss.item(), tokens.item()) == (6.0, 2)


def test_a_mask_without_a_token_gives_nothing() -> None:
    loss, tokens, report = masked_next_token_loss(torch.zeros(1, 3), torch.ones(1, 3), check_for_nan_in_loss=False)
    assert (loss.item(), tokens.item(), report["lm loss"].tolist()) == (0.0, 0, [0.0, 0.0])


def test_the_other_name_is_the_same_function() -> None:
    assert masked_token_loss is masked_next_token_loss


SCRIPT = """
import json, logging, sys
import torch
from megatron.core import rerun_state_machine as rerun
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode
from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.losses import masked_next_token_loss

cpu.install()
lines = []


class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


logging.getLogger().addHandler(Keep())
found = {}


def loss_of(value, **checks):
    return masked_next_token_loss(torch.ones(1, 1), torch.tensor([[value]]), **checks)[0].item()


def refused(value, **checks):
    try:
        return loss_of(value, **checks)
    except RuntimeError as error:
        return "RuntimeError: " + str(error)


def fresh(mode):
    rerun.destroy_rerun_state_machine()
    if mode is not None:
        rerun.initialize_rerun_state_machine(mode=mode)
    return rerun.get_rerun_state_machine()


fresh(None)  # nobody has set one up
for name in ("nan", "inf", "-inf"):
    found[name] = refused(float(name))
    found["unchecked " + name] = str(refused(float(name), check_for_nan_in_loss=False))
    found["spiky only " + name] = str(refused(float(name), check_for_nan_in_loss=False, check_for_spiky_loss=True))
found["fine"] = refused(1.5)


def spikes(factor, last):
    machine = fresh(RerunMode.DISABLED)
    if factor is not None:
        machine.spiky_loss_factor = factor
    for _ in range(100):
        loss_of(2.0, check_for_spiky_loss=True)
    lines.clear()
    loss_of(last, check_for_spiky_loss=True)
    return [line for line in lines if "Spiky loss" in line]


found["spikes"] = {f"{factor} {last}": len(spikes(factor, last)) for factor, last in
                   ((None, 19.9), (None, 20.0), (3.0, 5.9), (3.0, 6.0), (3.0, -6.0))}


def steps(second, third):
    "Three steps of one micro-batch; the second step's loss is `second` at first and `third` when it is run again."
    machine = fresh(RerunMode.VALIDATE_RESULTS)
    machine._reduce_any = lambda value: tuple(value) if isinstance(value, list) else value  # no process group here
    data, told = RerunDataIterator(iter([float("nan"), 1.0, 1.0])), []
    for step in range(2):
        runs = 0
        while machine.should_run_forward_backward(data):
            next(data)
            runs += 1
            loss_of((float("nan") if step == 0 else second) if runs == 1 else third)
        told.append([runs, *machine.should_checkpoint_and_exit()[1:]])
    return told


found["good"] = steps(1.0, 1.0)
found["transient"] = steps(float("nan"), 1.0)
found["persistent"] = steps(float("nan"), float("nan"))
print("FOUND", json.dumps(found))
"""


@pytest.fixture
def found(ranks: Callable[..., Any]) -> dict[str, Any]:
    done = ranks(1, SCRIPT)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    values: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return values


def test_a_bad_loss_is_refused_by_the_rerun_machine(found: dict[str, Any]) -> None:
    for name, kind in (("nan", "NaN"), ("inf", "Inf"), ("-inf", "Inf")):
        assert f"Unexpected result {name} " in found[name]
        assert f"found {kind} in local forward loss" in found[name]
        assert next(entry.id for entry in load_catalogue() if entry.search(found[name])) == "nan_loss"
        assert found[f"unchecked {name}"] == found[f"spiky only {name}"] == name
    assert found["fine"] == 1.5
    # factor (default 10) x the largest of the first hundred, 2.0
    assert found["spikes"] == {"None 19.9": 0, "None 20.0": 1, "3.0 5.9": 0, "3.0 6.0": 1, "3.0 -6.0": 1}
    # [runs of the step, leave, exit code]; the very first step is never judged
    assert found["good"] == [[1, False, 0], [1, False, 0]]
    assert found["transient"] == [[1, False, 0], [2, True, 17]]
    assert found["persistent"] == [[1, False, 0], [2, True, 16]]
