"""The rerun state machine: distinguishing transient hardware faults from real results."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class RerunStateMachineConfig:
    """Reaction to a suspicious loss, and the faults to inject for testing it."""

    error_injection_rate: int = 0  # one fault in this many iterations; 0: none
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = "disabled"
    check_for_nan_in_loss: bool = True
    check_for_spiky_loss: bool = False
    spiky_loss_factor: float = 10.0  # a loss this many times the largest of the first 100 is spiky
