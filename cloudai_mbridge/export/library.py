"""The libraries of targets: imported on demand, their errors in one line and without credentials."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from cloudai_mbridge.errors import MBridgeError, ToolFailure
from cloudai_mbridge.install.process import last_words


def load(module: str, package: str) -> Any:
    """Import a module. ToolFailure: it is not installed; `package` is its name for pip."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ToolFailure(f"{error}; install it with: pip install '{package}'") from None


@contextlib.contextmanager
def errors_of(service: str, logger: str) -> Iterator[None]:
    """Raise ToolFailure with the last message of a service's library, whatever it raises.

    Its log records and warnings are not printed; they supply the message if the error has none.
    """
    log, said = logging.getLogger(logger), _Kept()
    before = log.propagate, log.handlers[:]
    log.propagate, log.handlers[:] = False, [said]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MBridgeError:
        raise
    except Exception as error:
        why = last_words(str(error) or next(iter(said.lines), ""), os.environ) or type(error).__name__
        raise ToolFailure(f"{service}: {why}") from None
    finally:
        log.propagate, log.handlers[:] = before


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
