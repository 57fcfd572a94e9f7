"""Fields that must be equal for two results to be compared: the work, its size, where it ran, how it was counted.

A field is in the key if changing it changes the expected result. Left out is the subject of the test (container
image, commits, package versions, driver), and everything without influence on speed (names and directories of logs,
checkpoint directories, time limits, profilers that are off). An argument at its model's default counts as not set.
Credentials are left out entirely, both values and names.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.models.base import OverrideKey
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
from cloudai_mbridge.models.toml_source import MOST_TOML
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.model import comparability_id, plain
from cloudai_mbridge.training.credentials.find import is_secret
from cloudai_mbridge.training.credentials.scrub import redacted_in

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
        **{f"args.{name}": value for name, value in _arguments(args).items()},
        **{f"extra.{name}": value for name, value in _overrides(overrides).items()},
        **{f"point.{name}": value for name, value in _coordinates(run["coordinates"]).items()},
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


def _arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that define the work, without arguments that are set to their default."""
    return {
        name: value
        for name, value in _work(args).items()
        if not is_secret(name) and not (name in _DEFAULTS and value == _DEFAULTS[name])
    }


def _overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that define the work. "+" adds a key or sets it: the same work."""
    named = {name.lstrip("+"): value for name, value in overrides.items()}
    return {name: value for name, value in _work(named).items() if _may_be_an_override(name)}


def _coordinates(coordinates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the coordinates of the sweep other than arguments, which are in the key already."""
    named = {name: value for name, value in coordinates.items() if name not in _DEFAULTS}
    return {name: value for name, value in _work(named).items() if not _is_credential(name)}


def _work(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that define the work; credentials may be among them."""
    off = _off(values)
    kept = {name: value for name, value in values.items() if name not in _LEFT_OUT and name not in off}
    whether = {name: True for name, value in kept.items() if name in _WHETHER and value not in _NOT_SET}
    return whether | {name: value for name, value in kept.items() if name not in _WHETHER and not _names_a_log(name)}


def _off(values: Mapping[str, Any]) -> set[str]:
    """Return the arguments of profilers that are off."""
    off = [name for name in _PROFILERS if not values.get(name)]
    names = {option for name in off for option in (name, *_PROFILERS[name])}
    return names | set(_OF_ANY_PROFILER) if len(off) == len(_PROFILERS) else names


def _may_be_an_override(name: str) -> bool:
    """Return whether a test definition accepts an override of this name: it accepts no name of a credential."""
    try:
        _OVERRIDE.validate_python(name)
    except ValidationError:
        return False
    return True


def _is_credential(name: str) -> bool:
    """Return whether a variable's name may be a credential's. A number of tokens is excluded."""
    last = name.rpartition(".")[2]
    return is_secret(last) and not last.endswith("tokens")


def _names_a_log(name: str) -> bool:
    section, _, field = name.rpartition(".")
    return section.lstrip("+").endswith("logger") and field.endswith(_LOGGER_NAMES)


def _flat(value: Any) -> Any:
    """Return a scalar or a list of scalars; anything deeper as its JSON."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list | dict) for item in items):
        return json.dumps(value, sort_keys=True)
    return value
