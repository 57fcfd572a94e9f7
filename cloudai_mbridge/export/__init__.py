"""Export of results to external tools: a module per target, through the target's own library.

The libraries are imported on demand, and their errors are one line without credentials.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from cloudai_mbridge.errors import MBridgeError, ToolFailure


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
    said = ""

    def keep_first(record: logging.LogRecord) -> bool:
        """Keep the first message, and have the handler print none."""
        nonlocal said
        said = said or record.getMessage()
        return False

    log, handler = logging.getLogger(logger), logging.Handler(logging.WARNING)
    handler.addFilter(keep_first)
    before = log.propagate, log.handlers[:]
    log.propagate, log.handlers[:] = False, [handler]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MBridgeError:
        raise
    except Exception as error:
        from cloudai_mbridge.install.process import last_words

        text = str(error) or said
        raise ToolFailure(f"{service}: {last_words(text, os.environ) or type(error).__name__}") from None
    finally:
        log.propagate, log.handlers[:] = before
