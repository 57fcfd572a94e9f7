"""Python's logging, configured by `logger.*`: the libraries' messages. A run's own reports do not go through it."""

import logging

from cloudai_mbridge.training.config.logger import LoggerConfig


def set_up_logging(config: LoggerConfig) -> None:
    """Set the level, and leave out warnings (`filter_warnings`) and the modules named in `modules_to_filter`.

    Records go to stderr. Handlers that exist are kept; `set_level_for_all_loggers` sets the level of loggers that have
    one of their own, too.
    """
    logging.basicConfig(format="%(name)s: %(message)s")
    root = logging.getLogger()
    root.setLevel(config.logging_level)
    for handler in root.handlers:
        for old in [each for each in handler.filters if isinstance(each, _Filter)]:
            handler.removeFilter(old)
        handler.addFilter(_Filter(config))
    if config.set_level_for_all_loggers:
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).setLevel(config.logging_level)


class _Filter(logging.Filter):
    def __init__(self, config: LoggerConfig) -> None:
        super().__init__()
        self._drops_warnings = config.filter_warnings
        self._modules = tuple(config.modules_to_filter or ())

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is shown."""
        if self._drops_warnings and record.levelno == logging.WARNING:
            return False
        return not any(record.name == name or record.name.startswith(f"{name}.") for name in self._modules)
