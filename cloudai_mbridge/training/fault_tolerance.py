"""The fault-tolerance adapter, under Megatron-Bridge's name; the code is in `resilience.fault_tolerance`."""

from cloudai_mbridge.training.resilience.fault_tolerance import (
    on_checkpoint_loaded,
    on_checkpointing_end,
    on_checkpointing_start,
    on_eval_step_end,
    on_eval_step_start,
    on_training_step_end,
    on_training_step_start,
    setup,
    shutdown,
)
from cloudai_mbridge.training.resilience.simulated_fault import maybe_setup_simulated_fault

__all__ = [
    "maybe_setup_simulated_fault",
    "on_checkpoint_loaded",
    "on_checkpointing_end",
    "on_checkpointing_start",
    "on_eval_step_end",
    "on_eval_step_start",
    "on_training_step_end",
    "on_training_step_start",
    "setup",
    "shutdown",
]
