"""Megatron-Bridge's names for logging."""

import logging
from collections.abc import Sequence

from cloudai_mbridge.training.config.logger import LoggerConfig
from cloudai_mbridge.training.exits import barrier_and_log
from cloudai_mbridge.training.logging_setup import set_up_logging
from cloudai_mbridge.training.progress_log import append_to_progress_log

__all__ = ["append_to_progress_log", "barrier_and_log", "setup_logging"]


def setup_logging(
    logging_level: int = logging.INFO,
    filter_warning: bool = True,
    modules_to_filter: Sequence[str] | None = None,
    set_level_for_all_loggers: bool = False,
) -> None:
    """Set Python's logging up as the fields of `logger` of these names do."""
    set_up_logging(
        LoggerConfig(
            logging_level=logging_level,
            filter_warnings=filter_warning,
            modules_to_filter=None if modules_to_filter is None else list(modules_to_filter),
            set_level_for_all_loggers=set_level_for_all_loggers,
        )
    )
