"""How the processes that write a checkpoint tell the rank that forked them what they wrote.

Megatron-Core uses a manager process for that: a second copy of the program, seconds to start, and left behind for ever
when the rank is killed. An unlinked temporary file does the same for processes that are forked.
"""

import pickle
import queue
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from cloudai_mbridge.training.compat import checkpoints


class ForkedResults:
    """A queue for one item, between a process and those forked from it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the save)

    def put(self, item: Any) -> None:
        """Leave the item; on the disk's cache when this returns."""
        self._file.seek(0)
        pickle.dump(item, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Take the item.

        Raises:
            queue.Empty: none was left, or the process was killed while it wrote.
        """
        self._file.seek(0)
        try:
            return pickle.load(self._file)  # noqa: S301 (our own file, which has no name)
        except (EOFError, pickle.UnpicklingError) as error:
            raise queue.Empty from error


@contextmanager
def forked_results() -> Iterator[None]:
    """Let the saves that are prepared inside use `ForkedResults`."""
    name = checkpoints.RESULTS_QUEUE
    original = getattr(filesystem_async, name)
    setattr(filesystem_async, name, ForkedResults)
    try:
        yield
    finally:
        setattr(filesystem_async, name, original)
