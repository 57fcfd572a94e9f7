"""Open and close the logging services. Only the last rank logs, and only to what is configured.

A service's package is imported when it is opened. Keys come from the service's own environment variables (or, for
Comet, from `logger.comet_api_key`); nothing here prints or sends them.
"""

from cloudai_mbridge.training.loggers.packages import check_loggers
from cloudai_mbridge.training.loggers.services import (
    close_loggers,
    open_comet,
    open_mlflow,
    open_tensorboard,
    open_wandb,
)

__all__ = ["check_loggers", "close_loggers", "open_comet", "open_mlflow", "open_tensorboard", "open_wandb"]
