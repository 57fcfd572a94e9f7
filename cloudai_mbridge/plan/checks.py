"""Checks of a scenario before it is planned: unsupported parts, keys without effect, nodes, weights and data.

What this version reads but does not support is refused rather than run in part.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import calibration_note
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest, with_path
from cloudai_mbridge.models.shell import has_other_forms
from cloudai_mbridge.models.slurm_values import expand_hostlist, is_free, is_out_of_service, parse_group
from cloudai_mbridge.models.system import Executor, System
from cloudai_mbridge.models.test_definition import GRID_SEARCH, TUNE, last_warmup_step
from cloudai_mbridge.models.toml_source import suggest
from cloudai_mbridge.plan.launchers import launchers_of, notes_on_keys
from cloudai_mbridge.plan.run_plan import RunPlan
from cloudai_mbridge.plan.values import notes_on_images, problems_of_values
from cloudai_mbridge.sweep.expand import credentials_in_sweep

SBATCH_PREFIX = "SBATCH_"  # options of sbatch as variables
_MOST_STEPS = 10**15
_LITERAL = "only $NAME and ${NAME} are expanded; commands and other forms of the shell stay as they are written"
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


def refuse_unsupported(loaded: LoadedScenario, system: System) -> None:
    """Raise BadInput with one line for every part of the scenario that would be left out, or that a launcher lacks."""
    tests = [*loaded.tests, *([loaded.pre_test] if loaded.pre_test else []), *loaded.pre_hook, *loaded.post_hook]
    missing = [with_path(test.path, line) for test in tests for line in _in_test(test, system)]
    if missing:
        raise BadInput("\n".join(dict.fromkeys(missing)))


def _in_test(test: LoadedTest, system: System) -> Iterator[str]:
    where, definition = f"test {test.run.id!r}", test.definition
    first, *others = launchers_of(definition)
    yield from first.refusals(test, system)
    yield from credentials_in_sweep(definition, test.run)
    yield from problems_of_values(test, system)
    if system.executor is Executor.NEMO_RUN and any(launcher.has_script for launcher in (first, *others)):
        names = ["[nsys]"] if definition.nsys is not None and definition.nsys.enable else []
        for name in ("enable_nsys", "enable_vboost", "lock_gpu_freq", "peak_mem_clk"):
            value = getattr(definition.cmd_args, name)
            if any(each not in (None, False, -1) for each in (value if isinstance(value, list) else [value])):
                names.append(f"cmd_args.{name}")
        for name in names:  # which only our own scripts apply
            yield f"{where}: {name} with executor = 'nemo_run' is not supported; use executor = 'mbridge'"
    if definition.agent not in (GRID_SEARCH, TUNE):
        yield f"{where}: agent = {definition.agent!r} is unknown; use {GRID_SEARCH!r} or {TUNE!r}"
    if definition.agent == TUNE and definition.agent_steps is not None and definition.agent_steps < 1:
        yield f"{where}: agent_steps = {definition.agent_steps} tries nothing; use at least 1"
    if definition.env_params:
        yield (
            f"{where}: env_params is not supported: grid_search samples nothing"
            " (CloudAI refuses it with grid_search, too); remove the table"
        )


def notes_on_scenario(loaded: LoadedScenario, system: System) -> Iterator[str]:
    """Yield a line for the scenario's own keys without effect, and for the system's keys, given its tests."""
    yield from notes_on_keys(f"scenario {loaded.scenario.name!r}", loaded.scenario)
    launchers = dict.fromkeys(launchers_of(test.definition)[0] for test in loaded.tests)
    yield from (note for launcher in launchers for note in launcher.notes_on_system(system))


def notes_on_system(system: System) -> Iterator[str]:
    """Yield a line for keys with no effect, or with less than expected, and for values that Slurm may refuse."""
    yield from notes_on_keys(f"system {system.name!r}", system)
    for partition in system.partitions:
        yield from notes_on_keys(f"system {system.name!r}: partition {partition.name!r}", partition)
    for name, value in system.global_env_vars.items():
        if has_other_forms(str(value)):
            yield f"system {system.name!r}: global_env_vars.{name}: {_LITERAL}"
    if note := calibration_note(system):
        yield note
    dropped = sorted(name for name in os.environ if name.startswith(SBATCH_PREFIX))
    if dropped and not system.is_one_machine:
        yield (
            f"{', '.join(dropped)}: set in this shell, and not passed to the jobs, whose options come from the files"
            " alone; write them into the system's extra_sbatch_args"
        )
    if unlisted := unlisted_partition(system):
        yield f"system {system.name!r}: {unlisted}"


def unlisted_partition(system: System) -> str | None:
    """Return the error of a default partition that a system does not list, None if it is valid."""
    names = [partition.name for partition in system.partitions]
    unknown = next((name for name in system.default_partition.split(",") if name not in names), None)
    if unknown is None or not names:
        return None
    return f"default_partition: {unknown!r} is not among the [[partitions]]; {suggest(unknown, names)}"


def notes_on(test: LoadedTest) -> Iterator[str]:
    """Yield a line for every key of a test that has no effect, here or in CloudAI."""
    where, definition = f"test {test.run.id!r}", test.definition
    launcher = launchers_of(definition)[0]
    if "num_nodes" in test.run.model_fields_set and test.run.num_nodes is None and not test.run.nodes:
        yield f"{where}: num_nodes = 0 counts as unset, as in CloudAI: points take as few nodes as have their GPUs"
    if definition.agent_steps is not None and definition.agent != TUNE:
        yield f"{where}: agent_steps has no effect; [sweep] max_points limits the points"
    yield from notes_on_keys(where, test.run)
    yield from notes_on_keys(where, definition)
    yield from launcher.notes_on_test(where, definition)
    if definition.training_report is not None:
        yield from notes_on_keys(f"{where}: training_report", definition.training_report)
    extra = {key.lstrip("+") for key in definition.extra_cmd_args}
    if given := [
        *(["load_dir"] if definition.cmd_args.load_dir else []),  # type: ignore[attr-defined]
        *(["checkpoint.load"] if "checkpoint.load" in extra else []),
    ]:
        yield (
            f"{where}: {given[0]}: a checkpoint of step N is trained from step N+1 to max_steps, and the warm-up begins"
            " there; with another max_steps than it was saved under, set scheduler.override_opt_param_scheduler=true"
        )
    for repo in definition.git_repos:
        yield from notes_on_keys(f"{where}: git_repos of {repo.commit!r}", repo)
    for name, value in definition.extra_env_vars.items():  # a value itself may be a credential
        if any(map(has_other_forms, value if isinstance(value, list) else [value])):
            yield f"{where}: extra_env_vars.{name}: {_LITERAL}"
    yield from (f"{where}: {note}" for note in notes_on_images(test, None))


# Partition -> node -> its state as `sinfo` writes it, or None if Slurm does not answer.
NodeStates = Callable[[str], Mapping[str, str] | None]


def unknown_states(partition: str) -> None:
    """Return no states: the nodes are taken in the order of the system file."""


def resolve_groups(loaded: LoadedScenario, system: System, states: NodeStates) -> LoadedScenario:
    """Replace every PARTITION:GROUP:COUNT of the scenario by the names of nodes, and take excluded nodes out.

    BadInput: no such partition or group, it has too few nodes in service, or every named node is excluded.
    """
    tests, pre, post = (
        [_resolved(test, system, states) for test in group]
        for group in (loaded.tests, loaded.pre_hook, loaded.post_hook)
    )
    return replace(loaded, tests=tests, pre_hook=tuple(pre), post_hook=tuple(post))


def _resolved(test: LoadedTest, system: System, states: NodeStates) -> LoadedTest:
    run = test.run
    excluded = {name for nodes in run.exclude_nodes for name in expand_hostlist(nodes)}
    named = {name for spec in run.nodes if ":" not in spec for name in expand_hostlist(spec)}
    if not named & excluded and not any(":" in spec for spec in run.nodes):
        return test
    where = f"test {run.id!r}: nodes"
    chosen: list[str] = []
    for spec in run.nodes:
        if ":" in spec:
            chosen += _of_group(spec, system, states, {*chosen, *excluded}, where)
        else:
            chosen += [name for name in expand_hostlist(spec) if name not in excluded]
    if not chosen:
        raise BadInput(f"{where}: exclude_nodes excludes all of {', '.join(run.nodes)}; remove one of the two")
    chosen = list(dict.fromkeys(chosen))
    return replace(test, run=run.model_copy(update={"nodes": chosen, "num_nodes": len(chosen)}))


def _of_group(spec: str, system: System, states: NodeStates, left_out: set[str], where: str) -> list[str]:
    partition, group, count = parse_group(spec)
    known = states(partition)
    partitions = {each.name: each for each in system.partitions}
    if partition not in partitions:
        raise BadInput(
            f"{where}: no partition {partition!r} in system {system.name!r}; known: {', '.join(partitions) or 'none'}"
        )
    groups = {each.name: each for each in partitions[partition].groups}
    if group not in groups:
        raise BadInput(f"{where}: no group {group!r} in partition {partition!r}; known: {', '.join(groups) or 'none'}")
    names = dict.fromkeys(name for nodes in groups[group].nodes for name in expand_hostlist(nodes))
    listed = [name for name in names if name not in left_out]
    state_of = {name: (known or {}).get(name, "unknown") for name in listed}

    def is_usable(state: str) -> bool:
        return is_free(state) if count is None else not is_out_of_service(state)

    usable = [name for name in listed if known is None or is_usable(state_of[name])]
    wanted = len(usable) if count is None else count
    if not 0 < wanted <= len(usable):
        rest = [f"{name} ({state_of[name]})" for name in sorted(set(listed) - set(usable))]
        note = f"; not usable: {', '.join(rest)}" if rest else ""
        raise BadInput(f"{where}: {spec!r}: nodes to use in the group: {len(usable)}{note}; ask for fewer")
    # idle nodes first, then nodes whose job is ending; otherwise the order of the file
    usable.sort(key=lambda name: [not state_of[name].startswith(first) for first in ("idle", "comp")])
    return usable[:wanted]


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
        loaded = _loaded(run)
        is_old = loaded and not any(_holds(run, loaded, *each) for each in saved)
        if is_old and system.sees(loaded, output_dir, is_in_container=bool(run.container_image)):
            _require_steps_left(run, Path(loaded), files.get(run.test_id))
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


def _loaded(run: RunPlan) -> str:
    """Return the absolute path of the checkpoints that a run goes on from, "" if it begins at step 1 or is unknown."""
    path = _value(run, "checkpoint", "load") or run.args.get("load_dir") or ""
    is_open = not str(path).startswith("/") or "$" in str(path) or _value(run, "checkpoint", "ckpt_step") is not None
    return "" if is_open or _value(run, "checkpoint", "finetune") else str(path)


def _require_steps_left(run: RunPlan, loaded: Path, file: Path | None) -> None:
    """Raise BadInput if the newest checkpoint has all the steps of a run, or all but those of the warm-up."""
    try:
        done = int((loaded / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # which the training reports, if it needs it
        return
    if run.num_steps is None or not 0 < done < _MOST_STEPS or not (loaded / f"iter_{done:07d}").is_dir():
        return
    last = last_warmup_step(done + 1, run.warmup_steps, run.num_steps, run.definition)
    if (needed := max(last, done)) < run.num_steps:
        return
    warmup = f", and the warm-up takes {last - done} more" if last > done else ""
    where = "cmd_args.load_dir" if run.args.get("load_dir") else "extra_cmd_args: checkpoint.load"
    text = (
        f"test {run.test_id!r}: {where} = {str(loaded)!r} is at step {done} of max_steps = {run.num_steps}{warmup}:"
        f" no step is left to measure; set max_steps to at least {needed + 1}"
    )
    raise BadInput(with_path(file, text))


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
