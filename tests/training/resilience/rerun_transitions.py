"""Every transition of the rerun machine, with rejections on the last rank only; run on one rank and on two."""

import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, get_rerun_state_machine

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.config.rerun import RerunStateMachineConfig
from cloudai_mbridge.training.resilience.rerun_machine import initialize_rerun

GO_ON, EXIT_16, EXIT_16_SAVE = (False, False, 0), (False, True, 16), (True, True, 16)
EXIT_17 = (False, True, 17)
IS_OLD = installed_release() in ("0.16", "0.17")
EXIT_17_SAVE = (IS_OLD, True, 17)  # newer releases go on from the checkpoint before
TRACKER = "tracker.txt"


def new_machine(
    mode: str = "validate_results", complete: bool = True, tracker: str | None = None, **config: Any
) -> Any:
    rerun = RerunStateMachineConfig(rerun_mode=mode, **config)
    initialize_rerun(SimpleNamespace(rerun_state_machine=rerun), tracker)
    machine = get_rerun_state_machine()
    machine.first_iteration_complete = complete
    return machine


def is_bad(value: torch.Tensor) -> bool:
    """Reject what is above 1, on the last rank."""
    return dist.get_rank() == dist.get_world_size() - 1 and bool(value > 1)


def step(machine: Any, results: list[float], fatal: bool = True, data: Any = None) -> tuple[bool, bool, int]:
    """Run one step; attempt i computes `results[i]`, and there have to be as many attempts."""
    attempts = 0
    while machine.should_run_forward_backward(data):
        assert attempts < len(results), f"{attempts + 1} attempts"
        result = torch.tensor(results[attempts], requires_grad=True) * 1.0
        machine.validate_result(torch.tensor(0.5), is_bad, "loss", fatal=fatal)
        machine.validate_result(result, is_bad, "loss", fatal=fatal)
        attempts += 1
    assert attempts == len(results), (attempts, machine.state)
    return machine.should_checkpoint_and_exit()


def resumed(machine: Any, name: str, elsewhere: bool) -> Any:
    """Save the machine in Megatron's checkpoint format, and load it into a new one."""
    path = Path(name)
    path.mkdir(exist_ok=True)
    dist.barrier()
    if not (path / "metadata.json").exists():
        dist.barrier()
        dist_checkpointing.save({"rerun": machine.state_dict(None, "torch_dist")}, name)
    dist.barrier()
    fresh = new_machine(complete=False)
    template = {"rerun": fresh.state_dict(None, "torch_dist", force=True)}
    loaded = dist_checkpointing.load(template, name)["rerun"]
    assert fresh.validate_state_dict(loaded)
    fresh.load_state_dict(loaded)
    fresh.current_iteration = loaded["current_iteration"] - 1  # as the loop does: the last complete step
    if elsewhere:
        fresh.suspicious_node = "another node"
    return fresh


def check_disabled() -> None:
    machine = new_machine("disabled", tracker=TRACKER)
    if dist.get_rank() == 0:  # alone: a collective would never return
        for iteration in range(3):
            assert step(machine, [0.0]) == GO_ON
            assert machine.current_iteration == iteration
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        machine.current_iteration = 6
        assert machine.should_run_forward_backward(None)
        machine.validate_result(torch.tensor(2.0), is_bad, "spiky loss", fatal=False)
        text = assert_raises(RuntimeError, lambda: machine.validate_result(torch.tensor(2.5), is_bad, "loss"))
        for fact in (f"Rank {last}", os.uname().nodename, "device cpu", "iteration 7", "2.5", "'loss'"):
            assert fact in text, (fact, text)
        lines = Path(TRACKER).read_text().splitlines()
        assert len(lines) == 2, lines
        assert f"rank={last} iteration=7 status=rerun_disabled result=2.0 message='spiky loss'" in lines[0], lines
        assert machine.get_skipped_iterations_from_tracker_file(TRACKER) == [7]


def check_healthy() -> None:
    machine = new_machine(complete=False)
    assert step(machine, [5.0]) == GO_ON  # the first step is not judged: there is no optimizer step to go back to
    assert step(machine, [0.0]) == GO_ON
    assert machine.state == RerunState.NOT_RUNNING_YET
    assert machine.current_iteration == 1
    assert (machine.state_dict(None, "torch_dist") is None) == IS_OLD  # newer ones save it in every checkpoint


def check_transient() -> None:
    machine = new_machine()
    assert step(machine, [5.0, 0.5]) == EXIT_17_SAVE
    assert machine.state == RerunState.RERUNNING_IN_PLACE
    again = resumed(machine, "transient", elsewhere=False)
    assert again.state == RerunState.NOT_RUNNING_YET  # the diagnosis is done: the step is an ordinary one
    assert step(again, [0.5]) == GO_ON
    assert again.current_iteration == 0
    machine = new_machine()
    assert step(machine, [5.0, 0.5], fatal=False) == GO_ON
    assert machine.state == RerunState.NOT_RUNNING_YET


def check_reproducible() -> None:
    machine = new_machine()
    assert step(machine, [0.5]) == GO_ON
    assert step(machine, [5.0, 5.0], fatal=False) == GO_ON
    assert step(machine, [5.0, 5.0]) == EXIT_16_SAVE
    assert machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
    same = resumed(machine, "reproducible", elsewhere=False)
    assert step(same, [5.0]) == EXIT_16
    assert same.state == RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
    for second in (5.0, 0.5):  # a correct result and a persistent error
        other = resumed(machine, "reproducible", elsewhere=True)
        assert step(other, [second]) == EXIT_17, second
        assert other.state == RerunState.RERUNNING_FROM_CHECKPOINT
        assert other.current_iteration == 2
    other = resumed(machine, "reproducible", elsewhere=True)
    assert step(other, [5.0], fatal=False) == GO_ON
    assert other.state == RerunState.NOT_RUNNING_YET
    assert step(other, [0.5]) == GO_ON
    assert other.current_iteration == 3


def check_disabled_ignores_checkpoint() -> None:
    machine = new_machine()
    assert step(machine, [5.0, 5.0]) == EXIT_16_SAVE
    saved = machine.state_dict(None, "torch_dist")
    saved["sharded"] = saved["sharded"].data
    fresh = new_machine("disabled")
    fresh.load_state_dict(saved)
    assert step(fresh, [0.5]) == GO_ON
    assert fresh.mode == RerunMode.DISABLED


def check_last_rejection_is_forgotten() -> None:
    """A rank whose result was rejected, and let pass, is not judged again in a rerun that another rank asks for."""
    machine = new_machine()
    assert step(machine, [5.0, 5.0], fatal=False) == GO_ON  # the last rank
    results = iter([0.7, 0.6])
    while machine.should_run_forward_backward(None):
        value = next(results)
        machine.validate_result(torch.tensor(0.5), is_bad, "loss")
        machine.validate_result(torch.tensor(value), is_bad, "loss")
        on_first = partial(lambda value, is_first: is_first and bool(value > 1), is_first=dist.get_rank() == 0)
        machine.validate_result(torch.tensor(9.0), on_first, "grad norm", fatal=False)
    assert not machine.checkpoint_requested
    assert machine.continue_requested == (dist.get_rank() == 0)
    assert machine.should_checkpoint_and_exit() == GO_ON


def check_injected_errors() -> None:
    machine = new_machine(error_injection_rate=1, error_injection_type="transient_error")
    assert step(machine, [0.5, 0.5]) == EXIT_17_SAVE
    for kind in ("persistent_error", "correct_result"):
        machine = new_machine(error_injection_rate=1, error_injection_type=kind)
        assert step(machine, [0.5, 0.5]) == EXIT_16_SAVE
        other = resumed(machine, kind, elsewhere=True)
        assert other.error_injector.error_injection_rate == 0  # as the resumed run is configured
        assert step(other, [0.5]) == EXIT_17
    machine = new_machine(error_injection_rate=1, error_injection_type="correct_result")
    for _ in range(2):  # once per step
        assert step(machine, [0.5, 0.5], fatal=False) == GO_ON
    machine = new_machine(error_injection_rate=10**9)
    assert step(machine, [0.5]) == GO_ON


def check_stats(capture: list[str]) -> None:
    machine = new_machine("report_determinism_stats")
    for _ in range(4):
        assert step(machine, [1.0, 1.5]) == GO_ON
        assert machine.state == RerunState.NOT_RUNNING_YET
    if dist.get_rank() == 0:
        headings = [line for line in capture if line.startswith("Stats on computation determinism")]
        assert len(headings) == 2, capture  # iterations 0 and 2
        world = dist.get_world_size()
        assert f"  loss: {3 * 2 * world}/{3 * world} total/identical samples" in capture[-1], capture
        assert "max: 4.000E-01" in capture[-1], capture
    else:
        samples = sum(len(each.samples) for each in machine.stats.values())
        assert samples == 1, samples  # iteration 3 only: the others are told to rank 0


def check_stats_of_one_rank() -> None:
    """Only the last pipeline stage computes a loss."""
    machine = new_machine("report_determinism_stats")
    while machine.should_run_forward_backward(None):
        if dist.get_rank() == dist.get_world_size() - 1:
            machine.validate_result(torch.tensor(random.random()), is_bad, "loss")
    assert machine.should_checkpoint_and_exit() == GO_ON


def check_generators_and_data() -> None:
    machine = new_machine()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 17)
    data = RerunDataIterator(iter(range(100)))
    seen: list[Any] = []
    attempts = 0
    while machine.should_run_forward_backward(data):
        with tracker.fork("model-parallel-rng"):
            inside = torch.rand(1).item()
        seen.append([next(data), next(data), random.random(), np.random.rand(), torch.rand(1).item(), inside])
        machine.validate_result(torch.tensor(5.0), is_bad, "loss", fatal=False)
        attempts += 1
        if attempts == 2:
            assert_raises(AssertionError, lambda: next(data))
    assert len(seen) == 2, seen
    assert seen[0] == seen[1], seen
    assert machine.should_checkpoint_and_exit() == GO_ON
    while machine.should_run_forward_backward(data):
        assert next(data) == 2
    assert_raises(AssertionError, lambda: machine.should_run_forward_backward(iter([1])))


def check_rerun_is_bit_equal() -> None:
    def trained(rejects: bool) -> list[torch.Tensor]:
        machine = new_machine()
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        data = RerunDataIterator(iter(torch.randn(40, 4, 8)))
        runs = 0
        for number in range(5):
            while machine.should_run_forward_backward(data):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = model(next(data)).square().mean()
                    machine.validate_result(loss, lambda _, at=number: rejects and at == 3, "loss", fatal=False)
                    loss.backward()
                runs += 1
            assert machine.should_checkpoint_and_exit() == GO_ON
            optimizer.step()
        assert runs == (6 if rejects else 5), runs
        return [parameter.detach() for parameter in model.parameters()]

    for plain, rerun in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, rerun)


def assert_raises(kind: type[BaseException], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    """Run every check on a gloo group of all ranks."""
    cpu.install()
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines: list[str] = []
    sys.stdout.write = lambda text: lines.append(text.rstrip("\n")) or len(text)  # type: ignore[method-assign]
    with cpu.megatron_device():
        check_disabled()
        check_healthy()
        check_transient()
        check_reproducible()
        check_disabled_ignores_checkpoint()
        check_last_rejection_is_forgotten()
        check_injected_errors()
        check_stats(lines)
        check_stats_of_one_rank()
        check_generators_and_data()
        check_rerun_is_bit_equal()
    del sys.stdout.write
    dist.barrier()
    dist.destroy_process_group()
    print("all transitions hold")


if __name__ == "__main__":
    main()
