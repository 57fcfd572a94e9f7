"""Megatron-Core's rerun state machine, on any device, with its defects fixed.

A step whose result is rejected is computed again in place: a result that differs points to a transient fault; the same
result moves the job to another device (exit code 16, resume). There, another result means a persistent fault (exit code
17), the same result an error of the model or the data.
"""

import logging
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine as mcore
from megatron.core._rank_utils import safe_get_rank
from megatron.core.rerun_state_machine import (
    COMPARISON_MATCH,
    COMPARISON_MISMATCH,
    Call,
    Caller,
    QuickStats,
    RerunMode,
    RerunState,
    RerunStateMachine,
    RerunValidationStatus,
)

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.generators import set_tracker_states, tracker_states
from cloudai_mbridge.training.process.log_lines import write_line

logger = logging.getLogger(__name__)


class DeterminismStats(QuickStats):  # type: ignore[misc]
    """Megatron's statistics of one validation, which travel whole between ranks."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def relative_difference(first: Any, second: Any) -> float:
    """Return 0 for equal results (two NaNs too), infinity if one is not finite or their sum is 0, else |2(a-b)/(a+b)|.

    The results are floats or tensors of one element.
    """
    a, b = float(first), float(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return float(COMPARISON_MATCH)
    mean = a / 2 + b / 2
    if mean == 0 or not (math.isfinite(a) and math.isfinite(b)):
        return float(COMPARISON_MISMATCH)
    return abs((a - b) / mean)


def report_stats(stats: Mapping[Caller, QuickStats]) -> None:
    """Print, on rank 0, the statistics of all ranks since the start, and reset them on the others. Collective."""
    gathered: list[Any] = [dict(stats)]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(dict(stats), everyone)
        if everyone is None:
            for mine in stats.values():
                mine.reset()
            return
        gathered = everyone
    write_line("Stats on computation determinism in validation calls")
    for caller in sorted(set().union(*gathered)):
        # rank 0 may not have made this call: only the last pipeline stage computes a loss
        mine = stats[caller]
        mine.combine([theirs[caller] for theirs in gathered[1:] if caller in theirs])
        write_line(f"  {caller.message}: {mine.print_stats()}")


class RerunMachine(RerunStateMachine):  # type: ignore[misc]
    """The machine of one process; every rank makes the same calls, and outside of the mode `disabled` they reduce."""

    state: RerunState

    def __init__(self, *args: Any, spiky_loss_factor: float = 10.0, **kwargs: Any) -> None:
        """Take Megatron's arguments.

        spiky_loss_factor: a loss this many times the largest of the first 100 is spiky.
        """
        super().__init__(*args, **kwargs)
        self.spiky_loss_factor = spiky_loss_factor
        self.stats: dict[Caller, DeterminismStats] = defaultdict(DeterminismStats)
        self._iteration_to_rerun: int | None = None

    def set_mode(self, mode: RerunMode) -> None:
        """Change the mode; an evaluation does so twice, which is not worth a line."""
        self.mode = mode

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return whether to compute the step, again or for the first time; the transitions are Megatron's."""
        if self.state == RerunState.NOT_RUNNING_YET:
            # else a rerun requested by another rank would compare with this rank's last rejected result
            self.failed_validation_call = self.initial_result = None
            self.error_injector.injected_error_type = None
        if self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT and self._iteration_to_rerun is not None:
            self.current_iteration = self._iteration_to_rerun  # the loop counts from the last complete step
            self._iteration_to_rerun = None
        return bool(super().should_run_forward_backward(data_iterator))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of the run that saved the checkpoint; ignored in the mode `disabled`."""
        configured = self.error_injector.state_dict()
        super().load_state_dict(state_dict)
        if self.mode == RerunMode.DISABLED:
            return
        running = {"injected_error_type": self.error_injector.injected_error_type}
        self.error_injector.load_state_dict({**configured, **running})  # the injection rate is this run's
        if self.state == RerunState.WILL_RERUN_FROM_CHECKPOINT:
            self._iteration_to_rerun = self.current_iteration
        elif self.state != RerunState.NOT_RUNNING_YET:
            # its diagnosis was complete when the run ended (exit code 17): the step is a new one
            self.state = RerunState.NOT_RUNNING_YET
            self.current_iteration -= 1
            self.data_iterator_checkpoints = None

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Judge one result of the running step.

        Args:
            result: the value to judge, a float or a tensor of one element unless `comparison_func` is given.
            rejection_func: True for a result that cannot be right.
            message: names the judgement; a call is identified by its message and its number within the step.
            comparison_func: the relative difference between the first result and the second.
            tolerance: the largest difference that counts as the same result.
            fatal: end the run over it, when the diagnosis is complete.

        RuntimeError: the result is rejected and fatal, and reruns are disabled.
        """
        if self.mode == RerunMode.DISABLED:
            if rejection_func(result):
                self._log_validation_error_to_file(RerunValidationStatus.RERUN_DISABLED, result, message)
                text = f"{self._place()}: Unexpected result {_shown(result)} (message='{message}')"
                if fatal:
                    raise RuntimeError(text)
                logger.warning(text)
            return
        assert self.state != RerunState.NOT_RUNNING_YET, "validate_result called outside of the forward-backward pass"
        caller = Caller(message=message, rank=safe_get_rank())
        self.validation_counts[caller] += 1
        call = Call(caller=caller, sequence=self.validation_counts[caller])
        compare = comparison_func or relative_difference
        if self.mode == RerunMode.REPORT_DETERMINISM_STATS:
            if self.state == RerunState.INITIAL_RUN:
                self.rerun_requested = True
                self.saved_results[call] = _detached(result)
            elif self.state == RerunState.RERUNNING_IN_PLACE:
                assert call in self.saved_results, f"{call} was not made in the first run of the step"
                self.stats[Caller(call.caller.message, 0)].record(compare(self.saved_results[call], result))
        elif self.state == RerunState.INITIAL_RUN:
            # The first rejection of the step asks for a rerun; not before one optimizer step is done
            if self.rerun_requested or not self.first_iteration_complete:
                return
            if self.error_injector.maybe_inject() or rejection_func(result):
                self.failed_validation_call = call
                self.initial_result = _detached(result)
                self.rerun_requested = True
                self._report(RerunValidationStatus.INITIAL_RUN, call, result, "will be computed again", fatal=True)
        elif call == self.failed_validation_call:
            difference = self.error_injector.maybe_miscompare(compare, self.initial_result, result, self.state)
            judge = self._judge_rerun_in_place if self.state == RerunState.RERUNNING_IN_PLACE else self._judge_elsewhere
            judge(call, result, bool(difference <= tolerance), fatal)

    def _judge_rerun_in_place(self, call: Call, result: Any, is_same: bool, fatal: bool) -> None:
        self.continue_requested |= not fatal
        if not is_same:
            status = RerunValidationStatus.FIRST_RERUN_NOT_REPRODUCIBLE
            self._report(status, call, result, "possible transient error", fatal)
            return
        self.checkpoint_requested |= fatal
        self.suspicious_node, self.suspicious_device = _node(), _device_id()
        remedy = "to be computed on another device" if fatal else "going on, it is not fatal"
        self._report(RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE, call, result, f"the same again: {remedy}", fatal)

    def _judge_elsewhere(self, call: Call, result: Any, is_same: bool, fatal: bool) -> None:
        """Compare with the result of the job that was resumed, unless this is the device that computed it."""
        if (_node(), _device_id()) == (self.suspicious_node, self.suspicious_device):
            self.restart_again_requested = True
            logger.error("%s: rerun on the device under suspicion; resume on another one", self._place())
            return
        self.continue_requested |= not fatal
        if is_same:
            verdict = "the same on another device: a correct result, possibly an application error"
            self._report(RerunValidationStatus.SECOND_RERUN_REPRODUCIBLE, call, result, verdict, fatal)
        else:
            verdict = f"possible persistent error of node {self.suspicious_node}, device {self.suspicious_device}"
            self._report(RerunValidationStatus.SECOND_RERUN_NOT_REPRODUCIBLE, call, result, verdict, fatal)

    def _report(self, status: RerunValidationStatus, call: Call, result: Any, verdict: str, fatal: bool) -> None:
        message, values = call.caller.message, f"result {_shown(result)} (first: {_shown(self.initial_result)})"
        self._log_validation_error_to_file(status, result, message)
        level = logging.ERROR if fatal else logging.WARNING
        text = "%s, invocation %d: %s of '%s': %s"
        logger.log(level, text, self._place(), call.sequence, values, message, verdict)

    def _place(self) -> str:
        return f"Rank {safe_get_rank()}, node {_node()}, device {_device_id()}, iteration {self.current_iteration}"

    def _reduce_any(self, value: bool | list[bool]) -> Any:
        flags = value if isinstance(value, list) else [value]
        if dist.is_initialized():
            tensor = torch.tensor(flags, dtype=torch.int32, device=current_device())
            dist.all_reduce(tensor)
            flags = [count > 0 for count in tensor.tolist()]
        return tuple(flags) if isinstance(value, list) else flags[0]

    def _save_state(self) -> None:
        device = _device()
        self.saved_state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            # a CPU's is torch's own
            "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
            "other": self.state_save_func() if self.state_save_func else None,
        }

    def _restore_state(self) -> None:
        saved: Any = self.saved_state
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        if saved["device"] is not None:
            torch.get_device_module(_device()).set_rng_state(saved["device"], _device())
        if saved["other"] is not None and self.state_restore_func:
            self.state_restore_func(dict(saved["other"]))

    def _maybe_report_stats(self) -> None:
        if self.current_iteration % self.REPORTING_INTERVAL_ITERATIONS == 0:
            report_stats(self.stats)

    def _log_validation_error_to_file(self, status: RerunValidationStatus, result: Any, message: str) -> None:
        """Append one line, which `get_skipped_iterations_from_tracker_file` reads; a full disk must not end the run."""
        if self.result_rejected_tracker_filename is None:
            return
        job = os.getenv("SLURM_JOBID") or os.getenv("SLURM_JOB_ID", "N/A")
        line = (
            f"ts={datetime.now()} node={_node()} device={_device_id()} jobID={job} rank={safe_get_rank()} "
            f"iteration={self.current_iteration} status={status.value} result={_shown(result)} message='{message}'\n"
        )
        try:
            with open(self.result_rejected_tracker_filename, "a") as file:
                file.write(line)
        except OSError as error:
            logger.error("A rejected result could not be written to the tracker file: %s", error)


def _node() -> str:
    return os.uname().nodename


def _device() -> torch.device:
    return current_device() if dist.is_initialized() else torch.device("cpu")


def _device_id() -> int | str:
    device = _device()
    return device.type if device.index is None else device.index


def _detached(result: Any) -> Any:
    """Return a copy that outlives the step: the graph is let go, a buffer may be written again."""
    return result.detach().clone() if isinstance(result, torch.Tensor) else result


def _shown(result: Any) -> str:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return str(result.item())
    return " ".join(str(result).split())


def initialize_rerun(cfg: ConfigContainer, result_rejected_tracker_filename: str | None = None) -> None:
    """Set Megatron's machine to a new one; calling it again replaces it.

    result_rejected_tracker_filename: a line for each rejected result is appended to this file. Raises RuntimeError: it
    cannot be appended to.
    """
    config = cfg.rerun_state_machine
    machine = RerunMachine(
        state_save_func=tracker_states,
        state_restore_func=set_tracker_states,
        mode=mcore.RerunMode(config.rerun_mode),
        error_injector=mcore.RerunErrorInjector(
            error_injection_rate=config.error_injection_rate,
            error_injection_type=mcore.RerunDiagnostic(config.error_injection_type),
        ),
        result_rejected_tracker_filename=result_rejected_tracker_filename,
        spiky_loss_factor=config.spiky_loss_factor,
    )
    mcore.destroy_rerun_state_machine()
    mcore._set_rerun_state_machine(machine)
