"""Facts of a run and of the machine that wrote its report, for comparing results.

Two results can be compared if their keys are equal: the work, its size, where it ran, how it was counted. A field is in
the key if changing it changes the expected result. Left out is the subject of the test (container image, commits,
package versions, driver), and everything without influence on speed (names and directories of logs, checkpoint
directories, time limits, profilers that are off). An argument at its model's default counts as not set. Credentials
are left out entirely, both values and names.
"""

import json
import platform
import re
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.models.base import OverrideKey
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
from cloudai_mbridge.models.credentials import is_secret_variable
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.models.toml_source import MOST_TOML
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import comparability_id, plain
from cloudai_mbridge.training.credentials.find import is_secret
from cloudai_mbridge.training.credentials.scrub import redacted_in
from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY
from cloudai_mbridge.training.process.provenance import git_state, package_versions

_LEFT_OUT = {name for name, argument in ARGUMENTS.items() if argument.compared is False}
# Paths for which only matters whether they are set
_WHETHER = {name for name, argument in ARGUMENTS.items() if argument.compared == "whether"} | {
    "checkpoint.save",
    "logger.tensorboard_dir",
    "logger.wandb_project",
    "logger.mlflow_experiment",
    "logger.comet_project",
}
_NOT_SET = (None, "", "null", "None")
_PROFILERS = {
    "enable_nsys": ("nsys_trace", "nsys_extra_args", "profiling_gpu_metrics", "export_nsys_sqlite"),
    "pytorch_profiler": (),
    "record_memory_history": (),
}
_OF_ANY_PROFILER = ("profiling_start_step", "profiling_stop_step", "profiling_ranks")
# Overrides of the training configuration that name logs and experiments; their other fields count
_LOGGER_NAMES = (
    *("_dir", "_path", "_filepath", "_name", "_project", "_entity", "_experiment", "_workspace", "_tags", "_uri"),
)
_DEFAULTS = {name: field.default for name, field in ResolvedCmdArgs.model_fields.items()}
_OVERRIDE: TypeAdapter[str] = TypeAdapter(OverrideKey)


def compare_by(run: Mapping[str, Any], said: Mapping[str, Any], system: str, directory: Path) -> dict[str, Any] | None:
    """Return {"id", "fields"} of a planned run; None if its test.toml, which holds its configuration, is unreadable.

    run: from the plan. said: reported by the training itself. directory: of the run.
    """
    overrides = read_overrides(directory)
    if overrides is None:
        return None
    args = run["args"]
    extra = {name.lstrip("+"): value for name, value in overrides.items()}  # "+" adds a key or sets it: the same work
    others = {name: value for name, value in run["coordinates"].items() if name not in _DEFAULTS}
    fields = {
        "system": system,
        "launcher": args.get("launcher", "megatron_bridge"),
        "recipe": run["recipe"],
        "num_nodes": run["num_nodes"],
        "world_size": run["num_nodes"] * run["ranks_per_node"],
        "device": said.get("device") or args.get("gpu_type"),
        "dtype": said.get("dtype") or args.get("compute_dtype") or _DEFAULTS["compute_dtype"],
        "backend": said.get("backend"),
        "transformer_engine": said.get("transformer_engine"),
        "num_steps": run["num_steps"],
        "warmup_steps": run["warmup_steps"],
        **{
            f"args.{name}": value
            for name, value in _work(args).items()
            if not is_secret(name) and not (name in _DEFAULTS and value == _DEFAULTS[name])
        },
        **{f"extra.{name}": value for name, value in _work(extra).items() if _may_be_an_override(name)},
        **{
            f"point.{name}": value
            for name, value in _work(others).items()
            if not is_secret(name.rpartition(".")[2]) or name.endswith("tokens")  # a token count is not a secret
        },
    }
    fields = {name: _flat(plain(redacted_in(value))) for name, value in sorted(fields.items())}
    return {"id": comparability_id(fields), "fields": fields}


def read_overrides(directory: Path) -> dict[str, str] | None:
    """Return the overrides (`extra_cmd_args`) of a run's own test definition, None if it cannot be read."""
    try:
        definition = tomllib.loads(read_regular(directory / POINT_FILES.definition, MOST_TOML).decode())
    except (OSError, ValueError, RecursionError):
        return None
    overrides = definition.get("extra_cmd_args", {})
    is_whole = isinstance(overrides, dict) and all(isinstance(value, str) for value in overrides.values())
    return overrides if is_whole else None


def _work(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that define the work, without options of profilers that are off; there may be credentials."""
    off = [name for name in _PROFILERS if not values.get(name)]
    left_out = _LEFT_OUT | {option for name in off for option in (name, *_PROFILERS[name])}
    if len(off) == len(_PROFILERS):
        left_out |= set(_OF_ANY_PROFILER)
    kept = {name: value for name, value in values.items() if name not in left_out}
    whether = {name: True for name, value in kept.items() if name in _WHETHER and value not in _NOT_SET}
    for name, value in kept.items():
        section, _, field = name.rpartition(".")
        names_a_log = section.lstrip("+").endswith("logger") and field.endswith(_LOGGER_NAMES)
        if name not in _WHETHER and not names_a_log:
            whether[name] = value
    return whether


def _may_be_an_override(name: str) -> bool:
    """Return whether a test definition accepts an override of this name: it accepts no name of a credential."""
    try:
        _OVERRIDE.validate_python(name)
    except ValidationError:
        return False
    return True


def _flat(value: Any) -> Any:
    """Return a scalar or a list of scalars; anything deeper as its JSON."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in items):
        return json.dumps(value, sort_keys=True)
    return value


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

    run: from the plan; of its variables that may be secret, only the names are shown. nodes: of the job, as the
    scheduler writes them. said: reported by the training itself: text from a log, whose values of an unexpected type
    are left out. repository: of the scenario, as in the plan.
    """
    own = _table(said.get("environment"))
    variables = {**_table(run.get("recipe_env")), **_table(run.get("env"))}
    shown = {str(k): _HIDDEN if is_secret_variable(str(k), str(v)) else str(v) for k, v in variables.items()}
    hidden = {str(name): _HIDDEN for name in run.get("secret_names", ())}
    upstream = run.get("upstream")
    repos = [upstream["megatron_bridge"], *upstream["mounted"], upstream["nemo_run"]] if upstream else []
    try:
        hosts = expand_hostlist(nodes)
    except BadInput:  # a node list from the scheduler is not rejected
        hosts = [nodes]
    return {
        **{name: _text(own.get(name)) for name in _SAID},
        "device": _text(own.get("device")) or _text(said.get("device")),
        "packages": {str(name): str(version) for name, version in _table(own.get("packages")).items()},
        "git": _git(own.get("git")),
        "nodes": hosts or list(filter(None, [_text(own.get("hostname"))])),
        "image": image_of(run["container_image"]),
        "repositories": [
            {"url": url, "commit": commit} for url, commit in dict.fromkeys((r["url"], r["commit"]) for r in repos)
        ],
        "benchmark": _git(repository),
        "variables": dict(sorted((shown | hidden).items())),
    }


def image_of(reference: str) -> dict[str, str | None] | None:
    """Split a container image's reference; the digest is None unless it is pinned. For a file it never is."""
    if not reference:
        return None
    pinned = _DIGEST.search(reference)
    return {"name": reference[: pinned.start()] if pinned else reference, "digest": pinned[1] if pinned else None}


def _git(value: Any) -> dict[str, Any] | None:
    state = _table(value)
    commit, dirty = _text(state.get("commit")), state.get("dirty")
    return {"commit": commit, "dirty": dirty if isinstance(dirty, bool) else None} if commit else None


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def definitions_of(run: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions reported by the training; for the upstream launcher, the version that counts its FLOPs.

    said: text from a log. Values of an unexpected type are left out.
    """
    formula, kind = said.get("flops_formula"), said.get("memory_kind")
    if upstream := run.get("upstream"):
        commit = upstream["megatron_bridge"]["commit"]
        formula = f"upstream@{commit}" if _PINNED.fullmatch(commit) else None
    flops = said.get("flops_per_step")
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops <= sys.float_info.max:
        flops = None
    return {
        "flops_per_step": None if flops is None else float(flops),
        "flops_formula": _text(formula),
        "memory_kind": kind if kind in (RESERVED_MEMORY, RESIDENT_MEMORY) else None,
    }
