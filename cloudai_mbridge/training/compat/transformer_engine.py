"""Which Transformer Engine is installed, and what it asks of the environment.

Without it, Megatron-Core 0.16 has no version and its own test fails; newer releases say 0.0.0.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.utils import get_te_version, is_te_min_version

_TAKES_PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def have_te() -> bool:
    """Tell whether Transformer Engine can be imported."""
    version = get_te_version()
    return version is not None and str(version) != "0.0.0"


def te_is_at_least(version: str) -> bool:
    """Tell whether Transformer Engine is installed in `version` or a later one."""
    return have_te() and bool(is_te_min_version(version))


def describe_te() -> str:
    """Say what is installed, as an error message should."""
    return f"{get_te_version()} is installed" if have_te() else "none is installed"


@contextmanager
def taking_extra_states() -> Iterator[None]:
    """Let layers load the state of delayed scaling, which Transformer Engine since 2.20 refuses: it is a pickle.

    So is the rest of a checkpoint: who loads one trusts its source. A value of the variable from outside stays.
    """
    was_there = _TAKES_PICKLES in os.environ
    os.environ.setdefault(_TAKES_PICKLES, "1")
    try:
        yield
    finally:
        if not was_there:
            del os.environ[_TAKES_PICKLES]
