"""The rerun state machine of a run: Megatron-Core's singleton, set to ours from the configuration.

Megatron-Core's gradient buffers, the loss and the training step find it with Megatron's `get_rerun_state_machine()`.
"""

from typing import Any

from megatron.core import rerun_state_machine as mcore
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.resilience.rerun_machine import RerunMachine


def initialize_rerun(cfg: ConfigContainer, result_rejected_tracker_filename: str | None = None) -> None:
    """Set Megatron's machine to a new one; calling it again replaces it.

    result_rejected_tracker_filename: a line for each rejected result is appended to it.

    Raises:
        RuntimeError: the tracker file cannot be appended to.
    """
    config = cfg.rerun_state_machine
    machine = RerunMachine(
        state_save_func=_save_rng_tracker,
        state_restore_func=_restore_rng_tracker,
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


def _save_rng_tracker() -> dict[str, Any]:
    states = get_cuda_rng_tracker().get_states()
    return {name: state.clone() if hasattr(state, "clone") else state.clone_state() for name, state in states.items()}


def _restore_rng_tracker(states: dict[str, Any]) -> None:
    get_cuda_rng_tracker().set_states(states)
