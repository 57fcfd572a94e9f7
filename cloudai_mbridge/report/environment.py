"""What a run ran on, what its numbers mean, and what wrote the report."""

import math
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.metrics import Definitions
from cloudai_mbridge.models.values.hostlist import expand_hostlist
from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY
from cloudai_mbridge.training.process.provenance import git_state, package_versions

_SAID = ("device", "driver", "cuda", "nccl", "python")
# A commit, or the tag of a release. A branch is neither: what it means changes
_PINNED = re.compile(r"[0-9a-f]{7,40}|v?\d+(\.\d+)+([._-]?[A-Za-z0-9]+)*")
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def machine_environment() -> dict[str, Any]:
    """Return what wrote the report: this machine, this interpreter, this checkout."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "git": git_state(),
        "packages": package_versions(),
    }


def run_environment(run: Mapping[str, Any], nodes: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run ran on; None, and empty lists and tables, for what is unknown.

    run: of the plan. nodes: the job's, as the scheduler writes them. said: what the training said of itself, which is
    text from a log: what has another type than it should is left out.
    """
    own = _table(said.get("environment"))
    device = said.get("device")
    return {
        **{name: _text(own.get(name)) for name in _SAID},
        "device": _text(own.get("device")) or _text(device),
        "packages": {str(name): str(version) for name, version in _table(own.get("packages")).items()},
        "git": _git(own.get("git")),
        "nodes": _nodes(nodes) or [name for name in [_text(own.get("hostname"))] if name],
        "image": image_of(run["container_image"]),
        "repositories": list(_repositories(run.get("upstream"))),
    }


def image_of(reference: str) -> dict[str, str | None] | None:
    """Split a container image's reference; the digest is None unless it is pinned, as it never is for a file."""
    if not reference:
        return None
    pinned = _DIGEST.search(reference)
    return {"name": reference[: pinned.start()] if pinned else reference, "digest": pinned[1] if pinned else None}


def _nodes(text: str) -> list[str]:
    try:
        return expand_hostlist(text)
    except BadInput:  # the scheduler's word is not ours to refuse
        return [text]


def _git(value: Any) -> dict[str, Any] | None:
    state = _table(value)
    dirty = state.get("dirty")
    commit = _text(state.get("commit"))
    return {"commit": commit, "dirty": dirty if isinstance(dirty, bool) else None} if commit else None


def _repositories(upstream: Mapping[str, Any] | None) -> Iterator[dict[str, str]]:
    """Yield every repository once, Megatron-Bridge first."""
    seen = set()
    for repo in [upstream["megatron_bridge"], *upstream["mounted"], upstream["nemo_run"]] if upstream else []:
        if (pair := (repo["url"], repo["commit"])) not in seen:
            seen.add(pair)
            yield {"url": repo["url"], "commit": repo["commit"]}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def definitions_of(run: Mapping[str, Any], said: Mapping[str, Any]) -> Definitions:
    """Return what the training said of itself; for the upstream launcher, the version that counts its FLOPs.

    said: text from a log. What has another type than it should is left out.
    """
    upstream, flops, kind = run.get("upstream"), said.get("flops_per_step"), said.get("memory_kind")
    formula = said.get("flops_formula")
    if upstream:
        commit = upstream["megatron_bridge"]["commit"]
        formula = f"upstream@{commit}" if _PINNED.fullmatch(commit) else None
    return Definitions(
        flops_per_step=_positive(flops),
        flops_formula=formula if isinstance(formula, str) and formula else None,
        memory_kind=kind if kind in (RESERVED_MEMORY, RESIDENT_MEMORY) else None,
    )


def _positive(value: Any) -> float | None:
    """Return a number above zero; True is none, and neither is one too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def tokens_per_step_per_gpu(args: Mapping[str, Any], world_size: int) -> float | None:
    """Return the tokens of one step for each rank, None where the batch or the length is not known."""
    batch, length = args.get("gb"), args.get("seq_length")
    return batch * length / world_size if batch and length else None
