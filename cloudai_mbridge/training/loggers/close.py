"""Close the services' runs."""

from typing import Any


def close_loggers(tensorboard: Any, wandb: Any, mlflow: Any, comet: Any) -> None:
    """Send what is left and close; each may be None, and what is closed already stays so."""
    if tensorboard is not None:
        tensorboard.close()
    if wandb is not None:
        wandb.finish()
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.end_run()
    if comet is not None:
        comet.end()
