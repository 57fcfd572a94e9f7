"""Bind a rank to cores and memory near its GPU, as upstream's launcher does with numactl. Imports no torch."""

import os
import shutil
import sys
from collections.abc import MutableMapping, Sequence

from cloudai_mbridge.training.errors import ConfigError

BINDING = "MBRIDGE_BINDING"  # the ranks that share a NUMA node; with cores of their own N,CORES
_APART = 16  # cores from one rank's first to the next one's


def bind(env: MutableMapping[str, str] = os.environ, argv: Sequence[str] = sys.orig_argv) -> None:
    """Start this process again under numactl, if the environment sets how it is bound.

    ConfigError: the variable cannot be read, or numactl is not installed.
    """
    if not (text := env.pop(BINDING, "")):
        return
    words = [*_numactl(text, int(env.get("LOCAL_RANK", "0"))), *argv]
    if shutil.which(words[0]) is None:
        raise ConfigError("enable_pct_binding: numactl is not installed on this node; install it, or set it to false")
    sys.stdout.flush()
    os.execvp(words[0], words)  # noqa: S606 - no shell


def _numactl(text: str, local_rank: int) -> list[str]:
    try:
        ranks, *cores = map(int, text.split(","))
        node = local_rank // ranks
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{BINDING} = {text!r} is not RANKS or RANKS,CORES") from None
    own = ",".join(str(_APART * local_rank + core) for core in range(cores[0])) if cores else ""
    return ["numactl", f"--cpunodebind={node}", f"--membind={node}", *(["-C", own] if own else [])]
