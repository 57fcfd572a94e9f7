"""The environment of a run, the definitions of its numbers, and the machine that wrote the report."""

import platform
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.metrics import Definitions
from cloudai_mbridge.models.credentials import is_secret_variable
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY
from cloudai_mbridge.training.process.provenance import git_state, package_versions

_HIDDEN = "***"
_SAID = ("device", "driver", "cuda", "nccl", "python")
# A commit, or the tag of a release. A branch is excluded: the commit it refers to changes
_PINNED = re.compile(r"[0-9a-f]{7,40}|v?\d+(\.\d+)+([._-]?[A-Za-z0-9]+)*")
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def machine_environment() -> dict[str, Any]:
    """Return the machine, the interpreter and the checkout that wrote the report."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "git": git_state(),
        "packages": package_versions(),
    }


def run_environment(
    run: Mapping[str, Any], nodes: str, said: Mapping[str, Any], repository: Any = None
) -> dict[str, Any]:
    """Return a run's environment; None, and empty lists and tables, if unknown.

    run: from the plan. nodes: of the job, as the scheduler writes them. said: reported by the training itself: text
    from a log, whose values of an unexpected type are left out. repository: of the scenario, as in the plan.
    """
    own = _table(said.get("environment"))
    device = said.get("device")
    return {
        **{name: _text(own.get(name)) for name in _SAID},
        "device": _text(own.get("device")) or _text(device),
        "packages": {str(name): str(version) for name, version in _table(own.get("packages")).items()},
        "git": _git(own.get("git")),
        "nodes": _nodes(nodes) or list(filter(None, [_text(own.get("hostname"))])),
        "image": image_of(run["container_image"]),
        "repositories": _repositories(run.get("upstream")),
        "benchmark": _git(repository),
        "variables": _variables(run),
    }


def _variables(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables set by system, test, arguments and recipe; only the name of a possible secret."""
    known = {**_table(run.get("recipe_env")), **_table(run.get("env"))}
    hidden = {str(name): _HIDDEN for name in run.get("secret_names", ())}
    shown = {
        str(name): _HIDDEN if is_secret_variable(str(name), str(value)) else str(value) for name, value in known.items()
    }
    return dict(sorted((shown | hidden).items()))


def image_of(reference: str) -> dict[str, str | None] | None:
    """Split a container image's reference; the digest is None unless it is pinned. For a file it never is."""
    if not reference:
        return None
    pinned = _DIGEST.search(reference)
    return {"name": reference[: pinned.start()] if pinned else reference, "digest": pinned[1] if pinned else None}


def _nodes(text: str) -> list[str]:
    try:
        return expand_hostlist(text)
    except BadInput:  # a node list from the scheduler is not rejected
        return [text]


def _git(value: Any) -> dict[str, Any] | None:
    state = _table(value)
    commit, dirty = _text(state.get("commit")), state.get("dirty")
    return {"commit": commit, "dirty": dirty if isinstance(dirty, bool) else None} if commit else None


def _repositories(upstream: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Return every repository once, Megatron-Bridge first."""
    repos = [upstream["megatron_bridge"], *upstream["mounted"], upstream["nemo_run"]] if upstream else []
    pairs = dict.fromkeys((repo["url"], repo["commit"]) for repo in repos)
    return [{"url": url, "commit": commit} for url, commit in pairs]


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def definitions_of(run: Mapping[str, Any], said: Mapping[str, Any]) -> Definitions:
    """Return the definitions reported by the training; for the upstream launcher, the version that counts its FLOPs.

    said: text from a log. Values of an unexpected type are left out.
    """
    formula, kind = said.get("flops_formula"), said.get("memory_kind")
    if upstream := run.get("upstream"):
        commit = upstream["megatron_bridge"]["commit"]
        formula = f"upstream@{commit}" if _PINNED.fullmatch(commit) else None
    return Definitions(
        flops_per_step=_positive(said.get("flops_per_step")),
        flops_formula=_text(formula),
        memory_kind=kind if kind in (RESERVED_MEMORY, RESIDENT_MEMORY) else None,
    )


def _positive(value: Any) -> float | None:
    """Return a positive number, else None (bools and numbers too large for a float excluded)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= sys.float_info.max else None
