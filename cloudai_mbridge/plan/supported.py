"""Features that this version reads but does not support: such a scenario is refused rather than run in part."""

from collections.abc import Iterator, Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import calibration_note
from cloudai_mbridge.models.loading.explain import suggest
from cloudai_mbridge.models.loading.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.loading.loaded import with_path
from cloudai_mbridge.models.system import Executor, System
from cloudai_mbridge.models.test_definition import GRID_SEARCH, TUNE, TestDefinition
from cloudai_mbridge.models.values.references import has_other_forms
from cloudai_mbridge.plan.effects import notes_on_keys
from cloudai_mbridge.plan.launchers import launchers_of
from cloudai_mbridge.sweep.expand import credentials_in_sweep

_LITERAL = "only $NAME and ${NAME} are expanded; commands and other forms of the shell stay as they are written"


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
    if system.executor is Executor.NEMO_RUN and any(launcher.has_script for launcher in (first, *others)):
        for name in _of_our_scripts(definition):
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
    if definition.agent_steps is not None and definition.agent != TUNE:
        yield f"{where}: agent_steps has no effect; [sweep] max_points limits the points"
    yield from notes_on_keys(where, test.run)
    yield from notes_on_keys(where, definition)
    yield from launcher.notes_on_test(where, definition)
    if definition.training_report is not None:
        yield from notes_on_keys(f"{where}: training_report", definition.training_report)
    for repo in definition.git_repos:
        yield from notes_on_keys(f"{where}: git_repos of {repo.commit!r}", repo)
    for key in _partly_literal(definition, launcher.shell_args(definition)):
        yield f"{where}: {key}: {_LITERAL}"


def _partly_literal(definition: TestDefinition, args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of values that a shell would act on; the values themselves may be credentials."""
    values: dict[str, Any] = {
        **{f"extra_env_vars.{name}": value for name, value in definition.extra_env_vars.items()},
        **{f"cmd_args.{name}": value for name, value in args.items()},
        "extra_container_mounts": definition.extra_container_mounts,
    }
    for key, value in values.items():
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and has_other_forms(text) for text in texts):
            yield key


def _of_our_scripts(definition: TestDefinition) -> Iterator[str]:
    """Yield the settings of a test that only our own scripts apply."""
    if profiles(definition):
        yield "[nsys]"
    for name in ("enable_nsys", "enable_vboost", "lock_gpu_freq", "peak_mem_clk"):
        value = getattr(definition.cmd_args, name)
        if any(each not in (None, False, -1) for each in (value if isinstance(value, list) else [value])):
            yield f"cmd_args.{name}"


def profiles(definition: TestDefinition) -> bool:
    return definition.nsys is not None and definition.nsys.enable
