"""Check of the weights and the data that runs read, as far as this machine sees them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import with_path
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan.run_plan import RunPlan

_WEIGHTS = "checkpoint.pretrained_checkpoint"
# section.field of the training config -> the argument that sets it
_ARGUMENTS = {
    _WEIGHTS: "pretrained_checkpoint",
    "dataset.dataset_root": "dataset_root",
    "dataset.data_path": "dataset_paths",
    "dataset.blend_per_split": "c4_root",
}
# Of these, prefixes of data sets in Megatron-Core's format
_PREFIXES = ("dataset.data_path", "dataset.blend_per_split")


def check_inputs(
    runs: Iterable[RunPlan], system: System, output_dir: Path, files: Mapping[str, Path | None]
) -> tuple[str, ...]:
    """Return a note for each path of a test that can be checked only on the cluster.

    output_dir: of the runs. files: the tests' own, for messages.
    Left to the job: relative paths, which begin in its directory, paths with variables, and outputs of other tests.
    BadInput: a path is not there.
    """
    planned, known, notes = list(runs), dict[str, bool](), dict[str, None]()
    saved = {(run.test_id, str(path)) for run in planned if (path := _value(run, "checkpoint", "save"))}
    for run in planned:
        for name, path in _inputs(run):
            if not path.startswith("/") or "$" in path or any(_holds(run, path, *each) for each in saved):
                continue
            what = f"{name} = {path!r}"
            if not system.sees(path, output_dir, is_in_container=bool(run.container_image)):
                notes[f"test {run.test_id!r}: not evaluated: whether {what} exists on the cluster"] = None
            elif not known.setdefault(path, Path(path).exists()):
                where = "on this machine" if system.is_one_machine else "there, as seen from this machine"
                text = f"test {run.test_id!r}: {what} does not exist {where}; correct it, or create it first"
                raise BadInput(with_path(files.get(run.test_id), text))
    return tuple(notes)


def _holds(run: RunPlan, path: str, test_id: str, saved: str) -> bool:
    """Return whether another test saves to a path, or to a directory above or below it."""
    directory = os.path.normpath(path)
    return (
        test_id != run.test_id
        and saved.startswith("/")
        and os.path.commonpath([directory, saved]) in (directory, os.path.normpath(saved))
    )


def _inputs(run: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield name and path of the inputs of a run of the embedded loop."""
    may_resume = bool(_value(run, "checkpoint", "load")) and not run.training_config.get("peft")
    for place, argument in _ARGUMENTS.items():
        if may_resume and place == _WEIGHTS:  # a checkpoint there comes before it
            continue
        section, _, field = place.partition(".")
        name = f"cmd_args.{argument}" if run.args.get(argument) else f"extra_cmd_args: {place}"
        value = _value(run, section, field)
        if place in _PREFIXES:
            yield from ((name, path) for path in _paths(value))
        elif isinstance(value, str):
            yield name, value


def _value(run: RunPlan, section: str, field: str) -> Any:
    values = run.training_config.get(section)
    if not isinstance(values, Mapping) or values.get("hf_dataset"):  # that one is downloaded to its root
        return None
    return values.get(field)


def _paths(value: Any) -> Iterator[str]:
    """Yield the file of each prefix in a blend: of text, or of nested lists; weights may stand between them."""
    if isinstance(value, str):
        yield from (f"{word}.idx" for word in value.split() if "/" in word)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths(item)
