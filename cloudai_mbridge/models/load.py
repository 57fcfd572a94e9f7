"""Read systems, test definitions and scenarios from disk; every mistake becomes a BadInput that names its place."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.explain import explain, suggest
from cloudai_mbridge.models.scenario import Scenario, TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TEMPLATE, MegatronBridgeTestDefinition
from cloudai_mbridge.models.toml_source import TomlSource, read_toml

M = TypeVar("M", bound=BaseModel)
Warn = Callable[[str], None]


@dataclass(frozen=True)
class LoadedTest:
    """A scenario's entry with its complete definition."""

    run: TestRun
    definition: MegatronBridgeTestDefinition


@dataclass(frozen=True)
class LoadedScenario:
    """A scenario whose tests are all found."""

    scenario: Scenario
    tests: list[LoadedTest]
    pre_test: LoadedTest | None = None


def is_system(source: TomlSource) -> bool:
    return "scheduler" in source.data


def is_scenario(source: TomlSource) -> bool:
    return "Tests" in source.data


def is_baseline(source: TomlSource) -> bool:
    return "version" in source.data


def load_system(path: Path) -> System:
    """Read a system file."""
    source = read_toml(path)
    kinds: dict[str, type[LocalSystem] | type[SlurmSystem]] = {
        "local": LocalSystem,
        "standalone": LocalSystem,
        "slurm": SlurmSystem,
    }
    if not is_system(source):
        raise BadInput(f"{path}: is no system, the key scheduler is missing; set it to one of {', '.join(kinds)}")
    scheduler = source.data["scheduler"]
    if not isinstance(scheduler, str) or scheduler not in kinds:
        raise BadInput(f"{source.where(('scheduler',))}: {scheduler!r} is unknown; use one of {', '.join(kinds)}")
    return validate(kinds[scheduler], source.data, source)


def load_test_definition(path: Path, on_unknown_arg: Warn | None = None) -> MegatronBridgeTestDefinition:
    """Read one test definition; `on_unknown_arg` as in `load_scenario`."""
    source = read_toml(path)
    return _definition(source.data, source, (), on_unknown_arg)


def load_tests_dir(directory: Path | None) -> dict[str, TomlSource]:
    """Read all test TOMLs below a directory, by test name. Other templates' definitions are kept, unchecked.

    Systems and scenarios that lie there too are passed over.

    Raises:
        BadInput: no such directory, broken TOML, a file without a name, or two files with one name.
    """
    if directory is None:
        return {}
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory; --tests-dir takes the directory of the test TOMLs")
    found: dict[str, TomlSource] = {}
    for path in sorted(directory.rglob("*.toml")):
        if not path.is_file():
            continue
        source = read_toml(path)
        if is_system(source) or is_scenario(source) or is_baseline(source):
            continue
        name = source.data.get("name")
        if not isinstance(name, str):
            raise BadInput(f"{source.where(('name',))}: is missing; a test definition needs a name")
        if name in found:
            raise BadInput(f"{source.where(('name',))}: {name!r} is also the name of {found[name].path}; rename one")
        found[name] = source
    return found


def load_scenario(path: Path, tests_dir: Path | None, on_unknown_arg: Warn | None = None) -> LoadedScenario:
    """Read a scenario and find every test that it names.

    on_unknown_arg: told about every unknown key of `cmd_args`, which is left out then; without it, one is an error.
    """
    source = read_toml(path)
    if not is_scenario(source):
        raise BadInput(f"{path}: is no scenario, [[Tests]] is missing; give a scenario file")
    scenario = validate(Scenario, source.data, source)
    known = load_tests_dir(tests_dir)
    tests = [_load_test(i, run, source, known, tests_dir, on_unknown_arg) for i, run in enumerate(scenario.tests)]
    return LoadedScenario(scenario, tests, _load_pre_test(scenario, source, known, tests_dir, on_unknown_arg))


def _load_pre_test(
    scenario: Scenario, source: TomlSource, known: dict[str, TomlSource], tests_dir: Path | None, warn: Warn | None
) -> LoadedTest | None:
    """Return the test that the scenario's pre_test names."""
    name = scenario.pre_test
    if not name:
        return None
    if name not in known:
        remedy = suggest(name, list(known)) if known else "name the directory of its file with --tests-dir"
        raise BadInput(
            f"{source.where(('pre_test',))}: no test {name!r} in {tests_dir or 'any tests directory'}; {remedy}"
        )
    definition = _definition(known[name].data, known[name], (), warn)
    return LoadedTest(TestRun(id="pre_test", test_name=name), definition)


def _load_test(
    index: int,
    run: TestRun,
    source: TomlSource,
    known: dict[str, TomlSource],
    tests_dir: Path | None,
    warn: Warn | None,
) -> LoadedTest:
    overrides = run.overrides()
    if run.test_name is None:
        return LoadedTest(run, _definition(overrides, source, ("Tests", index), warn))
    if run.test_name not in known:
        where = source.where(("Tests", index, "test_name"))
        remedy = suggest(run.test_name, list(known)) if known else "name the directory of its file with --tests-dir"
        raise BadInput(f"{where}: no test {run.test_name!r} in {tests_dir or 'any tests directory'}; {remedy}")
    base = known[run.test_name]
    template = base.data.get("test_template_name", TEMPLATE)
    if template != TEMPLATE:
        raise BadInput(
            f"{base.where(('test_template_name',))}: {template!r} is not run by this tool, only {TEMPLATE!r}"
        )
    definition = _definition(base.data, base, (), warn)
    if not overrides:
        return LoadedTest(run, definition)
    merged = _merge(base.data, overrides)
    return LoadedTest(run, _definition(merged, source, ("Tests", index), warn))


def _definition(
    data: dict[str, Any], source: TomlSource, prefix: tuple[str | int, ...], warn: Warn | None
) -> MegatronBridgeTestDefinition:
    args = data.get("cmd_args")
    if warn is not None and isinstance(args, dict):
        unknown = [name for name in args if name not in ResolvedCmdArgs.model_fields]
        for name in unknown:
            remedy = suggest(name, list(ResolvedCmdArgs.model_fields))
            warn(f"{source.where((*prefix, 'cmd_args', name))}: unknown key, left out; {remedy}")
        data = {**data, "cmd_args": {name: value for name, value in args.items() if name not in unknown}}
    return validate(MegatronBridgeTestDefinition, data, source, prefix)


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Lay overrides over a definition; tables merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both_tables else value
    return merged


def validate(model: type[M], data: Any, source: TomlSource, prefix: tuple[str | int, ...] = ()) -> M:
    """Build `model` from the data at `prefix` of `source`.

    Raises:
        BadInput: one line per mistake.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join(explain(error, model, data, source, prefix))) from None
