"""What `logger.filter_warnings` and `logger.modules_to_filter` leave out of Python's logging."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cloudai_mbridge.training.config.logger import LoggerConfig, set_up_logging


@contextmanager
def only_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.StreamHandler[io.StringIO]]:
    """Put a handler in the place of pytest's, which other tests share."""
    handler = logging.StreamHandler(io.StringIO())
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [handler])
        level = logging.getLogger().level
        try:
            yield handler
        finally:
            logging.getLogger().setLevel(level)


def test_warnings_and_modules_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with only_handler(monkeypatch) as handler:
        set_up_logging(LoggerConfig(filter_warnings=True, modules_to_filter=["chatty"]))
        for name, level in (("quiet", logging.WARNING), ("chatty.part", logging.ERROR), ("chattypart", logging.ERROR)):
            logging.getLogger(name).log(level, f"at {level}")
    assert handler.stream.getvalue() == "at 40\n"


def test_a_second_call_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with only_handler(monkeypatch) as handler:
        set_up_logging(LoggerConfig(filter_warnings=True, modules_to_filter=["chatty"]))
        set_up_logging(LoggerConfig(filter_warnings=False, modules_to_filter=["quiet"]))
        for name in ("quiet", "chatty"):
            logging.getLogger(name).warning(name)
    assert len(handler.filters) == 1
    assert handler.stream.getvalue() == "chatty\n"
