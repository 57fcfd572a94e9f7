"""Shared outcome of all ranks: a failure on one rank fails every rank, so that none waits forever."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cloudai_mbridge.training.errors import CheckpointError

T = TypeVar("T")
FAILURES = (Exception, CheckpointException)  # torch derives its own from BaseException
_LONGEST = 300  # characters of another library's error message


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its value on every rank. A collective; the value must be picklable.

    Raises CheckpointError: on every rank, if `action` raised anything.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except FAILURES as error:
            outcome[1] = one_line(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    value: T = outcome[0]
    return value


def on_each_rank(path: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its own value. A collective.

    Raises CheckpointError: on every rank, if `action` raised anything on any of them; the first rank's message.
    """
    value, message, cause = None, None, None
    try:
        value = action()
    except FAILURES as error:
        text, cause = one_line(error), error
        message = text if path in text else f"{path}: {text}"
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    failed = [rank for rank, text in enumerate(messages) if text is not None]
    if failed:
        raise CheckpointError(messages[failed[0]] + ("" if failed[0] == 0 else f" (rank {failed[0]})")) from cause
    return value  # type: ignore[return-value]


def one_line(error: BaseException) -> str:
    """Return an error as one line. torch collects the ranks' errors in one error: the first is taken."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = sorted(error.failures.items())[0]
        return f"{one_line(inner)} (rank {rank})"
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, CheckpointError) else f"{text[:_LONGEST]} ({type(error).__name__})"
