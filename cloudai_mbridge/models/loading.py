"""Read systems, test definitions and scenarios from disk; every mistake becomes a BadInput that names its place."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cloudai_mbridge.errors import BadInput, counted, shown
from cloudai_mbridge.files.run_files import walk_without_runs
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.credentials import shown_value
from cloudai_mbridge.models.scenario import TestRun, TestScenario
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TEMPLATE, TestDefinition
from cloudai_mbridge.models.toml_source import KeyPath, TomlSource, explain, read_toml, suggest, suggest_field

M = TypeVar("M", bound=BaseModel)
Warn = Callable[[str], None]
HOOK_DIR = Path("conf/hook")  # below the current directory, as in CloudAI
SCHEDULERS: dict[str, type[System]] = {"local": LocalSystem, "standalone": LocalSystem, "slurm": SlurmSystem}
FOREIGN_SCHEDULERS = ("kubernetes", "lsf", "runai")
TEMPLATE_KEY = "test_template_name"
_ALIKE = 0.85  # similarity of spellings; MegatronRun, the nearest name in CloudAI, is at 0.64
_MOST_WARNINGS = 20


class ForeignSystem(BadInput):
    """A system that CloudAI knows and this tool does not."""


class ForeignTemplate(BadInput):
    """A file that is CloudAI's and not this tool's."""

    def __init__(self, path: Path, templates: Iterable[str]) -> None:
        self.names = sorted(set(templates))
        names = ", ".join(self.names)
        super().__init__(f"{path}: has nothing for this tool, which runs {TEMPLATE!r} only; it is of {names}")


@dataclass(frozen=True)
class LoadedTest:
    """A scenario's entry with its complete definition. path: the file of its definition."""

    run: TestRun
    definition: TestDefinition
    path: Path | None = None


def with_path(path: Path | None, text: str) -> str:
    """Return a message whose every line names a file, by default this one."""
    if path is None:
        return text
    named = (line if ".toml" in line.partition(": ")[0] else f"{path}: {line}" for line in text.split("\n"))
    return "\n".join(named)


@contextmanager
def naming_file(test: LoadedTest) -> Iterator[None]:
    """Prefix errors in a test with its file."""
    try:
        yield
    except BadInput as error:
        error.args = (with_path(test.path, str(error)),)
        raise


@dataclass(frozen=True)
class LoadedScenario:
    """A scenario whose tests are all found.

    pre_test: the test that checks every node first. pre_hook, post_hook: tests of the hooks' scenarios, that go before
    and after everything. foreign: id -> template of the tests that this tool does not run. notes: settings
    without effect.
    """

    scenario: TestScenario
    tests: list[LoadedTest]
    pre_test: LoadedTest | None = None
    pre_hook: tuple[LoadedTest, ...] = ()
    post_hook: tuple[LoadedTest, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestFiles:
    """All definitions below a directory, of any template, unchecked. A name may stand in several files."""

    __test__ = False

    directory: Path | None
    by_name: dict[str, list[TomlSource]]

    def __iter__(self) -> Iterator[TomlSource]:
        return (source for sources in self.by_name.values() for source in sources)

    def find(self, name: str, where: str) -> TomlSource:
        """Return the file of a test. As in CloudAI, a file of the directory itself precedes files of subdirectories.

        BadInput: the file is missing or ambiguous; `where` names it.
        """
        if name not in self.by_name:
            names = list(self.by_name)
            remedy = suggest(name, names) if names else "name the directory of its file with --tests-dir"
            raise BadInput(f"{where}: no test {name!r} in {self.directory or 'any tests directory'}; {remedy}")
        found = self.by_name[name]
        found = [source for source in found if source.path.parent == self.directory] or found
        if len(found) > 1:
            paths = " and ".join(str(source.path) for source in found[:3])
            raise BadInput(f"{where}: {name!r} is the name of {len(found)} tests, {paths}; narrow --tests-dir")
        return found[0]

    def choices(self, names: Iterable[str]) -> Iterator["TestFiles"]:
        """Yield selections of one file per name, until each of their files was selected once."""
        several = {name: found for name in names if len(found := self.by_name.get(name, [])) > 1}
        for i in range(max(map(len, several.values()), default=1)):
            chosen = {name: [found[min(i, len(found) - 1)]] for name, found in several.items()}
            yield TestFiles(self.directory, {**self.by_name, **chosen})


def template_of(source: TomlSource, prefix: KeyPath = ()) -> str:
    """Return the template of a test, at `prefix` of a file. BadInput: it is this tool's, misspelt."""
    test: Any = source.data
    for part in prefix:
        test = test[part]
    template = str(test.get(TEMPLATE_KEY, TEMPLATE))
    ours, own = (re.sub(r"[\W_]", "", name).lower() for name in (TEMPLATE, template))
    if template != TEMPLATE and difflib.SequenceMatcher(None, own, ours).ratio() > _ALIKE:
        where = source.where((*prefix, TEMPLATE_KEY))
        raise BadInput(f"{where}: {shown(template)} is unknown; did you mean {TEMPLATE!r}?")
    return template


def is_system(source: TomlSource) -> bool:
    return "scheduler" in source.data


def is_scenario(source: TomlSource) -> bool:
    return "Tests" in source.data


def is_baseline(source: TomlSource) -> bool:
    return "version" in source.data


def find_test_files(directory: Path | None, *, skip_broken: bool = False) -> TestFiles:
    """Read the TOMLs below a directory. Systems, scenarios, files without a name and results are skipped.

    BadInput: no such directory, or invalid TOML, unless that is to be skipped.
    """
    if directory is None:
        return TestFiles(None, {})
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory; --tests-dir takes the directory of the test TOMLs")
    paths = (path for path in walk_without_runs(directory)[0] if path.suffix == ".toml" and path.is_file())
    return find_tests_among(paths, directory, skip_broken=skip_broken)


def find_tests_among(paths: Iterable[Path], directory: Path | None, *, skip_broken: bool) -> TestFiles:
    """Read the tests among TOML files. directory: as of `TestFiles`. BadInput: as `find_test_files`."""
    by_name: dict[str, list[TomlSource]] = {}
    for path in paths:
        try:
            source = read_toml(path)
        except BadInput:
            if skip_broken:
                continue
            raise
        name = source.data.get("name")
        if isinstance(name, str) and not (is_system(source) or is_scenario(source) or is_baseline(source)):
            by_name.setdefault(name, []).append(source)
    return TestFiles(directory, by_name)


def load_system(path: Path) -> System:
    """Read a system file. The path of its calibration, if set, becomes absolute."""
    source = read_toml(path)
    known = ", ".join(SCHEDULERS)
    if not is_system(source):
        raise BadInput(f"{path}: is not a system, the key scheduler is missing; set it to one of {known}")
    scheduler, where = source.data["scheduler"], source.where(("scheduler",))
    if scheduler in FOREIGN_SCHEDULERS:
        raise ForeignSystem(f"{where}: {scheduler!r} is not supported; use one of {known}")
    if not isinstance(scheduler, str) or scheduler not in SCHEDULERS:
        raise BadInput(f"{where}: {shown_value(scheduler)} is unknown; use one of {known}")
    system = validate(SCHEDULERS[scheduler], source.data, source)
    if system.calibration is None or Path(system.calibration).is_absolute():
        return system
    if not (calibration := (path.parent / system.calibration).resolve()).is_file():
        where = source.where(("calibration",))
        raise BadInput(f"{where}: file {calibration} is missing; write it with `mbridge calibrate`, or remove the key")
    return system.model_copy(update={"calibration": str(calibration)})


def load_test_definition(path: Path, on_unknown_arg: Warn | None = None) -> TestDefinition:
    """Read one test definition; `on_unknown_arg` as in `load_scenario`."""
    source = read_toml(path)
    return _definition(source.data, source, on_unknown_arg)


def load_scenario(
    path: Path, tests: Path | TestFiles | None, on_unknown_arg: Warn | None = None, hooks: Path | None = HOOK_DIR
) -> LoadedScenario:
    """Read a scenario and find every test that it names. Tests of other templates are listed and left out.

    tests: the directory of the tests, or the files that were found in one.
    on_unknown_arg: called with every unknown key of `cmd_args`, which is then dropped; without it, an error.
    hooks: the directory of hooks; None skips them.
    """
    files = tests if isinstance(tests, TestFiles) else find_test_files(tests)
    loaded = _load_tests(path, files, on_unknown_arg)
    if not loaded.tests:
        raise ForeignTemplate(path, {template for _, template in loaded.foreign})
    return _with_hooks(loaded, read_toml(path), files, on_unknown_arg, hooks)


def _load_tests(path: Path, files: TestFiles, warn: Warn | None) -> LoadedScenario:
    source = read_toml(path)
    if not is_scenario(source):
        raise BadInput(f"{path}: is not a scenario, [[Tests]] is missing; give a scenario file")
    scenario = validate(TestScenario, source.data, source)
    bases, missing = _find_bases(scenario, source, files)
    templates = {
        i: template_of(bases[i]) if i in bases else template_of(source, ("Tests", i))
        for i in range(len(scenario.tests))
        if i not in missing
    }
    foreign = {scenario.tests[i].id: template for i, template in templates.items() if template != TEMPLATE}
    ours = [i for i, template in templates.items() if template == TEMPLATE]
    if missing and (ours or not foreign):
        raise next(iter(missing.values()))
    tests = [_load_test(i, scenario.tests[i], source, bases.get(i), warn) for i in ours]
    for run in (test.run for test in tests):
        for other in (dependency.id for dependency in run.dependencies if dependency.id in foreign):
            raise BadInput(
                f"{source.path}: test {run.id!r} depends on {other!r}, which is of {foreign[other]!r} and not run by"
                " this tool; remove the dependency"
            )
    notes = tuple(
        f"not run, because this tool runs {TEMPLATE!r} only: "
        f"{', '.join(test_id for test_id, other in foreign.items() if other == template)} ({template})"
        for template in dict.fromkeys(foreign.values())
    )
    return LoadedScenario(scenario, tests, foreign=tuple(foreign.items()), notes=notes)


def _find_bases(
    scenario: TestScenario, source: TomlSource, files: TestFiles
) -> tuple[dict[int, TomlSource], dict[int, BadInput]]:
    """Return the definition files that tests name, by place in the scenario, and the errors of missing files."""
    bases: dict[int, TomlSource] = {}
    missing: dict[int, BadInput] = {}
    for i, run in enumerate(scenario.tests):
        if run.test_name and missing and run.test_name not in files.by_name:
            missing[i] = next(iter(missing.values()))  # only the first is reported
        elif run.test_name:
            try:
                bases[i] = files.find(run.test_name, source.where(("Tests", i, "test_name")))
            except BadInput as error:
                missing[i] = error
    return bases, missing


def _with_hooks(
    loaded: LoadedScenario, source: TomlSource, files: TestFiles, warn: Warn | None, hooks: Path | None
) -> LoadedScenario:
    """Add the tests of pre_test and post_test: a hook's scenario, or for pre_test a test that checks every node."""
    scenario = loaded.scenario
    if hooks is None:
        named = [f"{key} = {name!r}" for key in ("pre_test", "post_test") if (name := getattr(scenario, key))]
        return replace(loaded, notes=(*loaded.notes, *(f"{text} is skipped, as requested" for text in named)))
    pre, post = (_find_hook(getattr(scenario, key), hooks, warn) for key in ("pre_test", "post_test"))
    if pre is None and scenario.pre_test:
        loaded = replace(loaded, pre_test=_node_check(scenario.pre_test, source, files, warn, hooks))
    if post is None and scenario.post_test:
        raise BadInput(f"{source.where(('post_test',))}: {_no_hook(scenario.post_test, hooks)}")
    if pre is not None and pre.foreign:
        raise BadInput(
            f"{source.where(('pre_test',))}: {scenario.pre_test!r} checks with {_templates(pre)}, which this tool does"
            " not run: training would start unchecked; use a hook of embedded tests, or --skip-hooks to run without"
        )
    notes = loaded.notes
    if post is not None and post.foreign:
        text = f"post_test = {scenario.post_test!r}: its tests of {_templates(post)} are not run, as in CloudAI"
        notes = (*notes, text)
    return replace(loaded, pre_hook=_named("pre_test", pre), post_hook=_named("post_test", post), notes=notes)


def _named(kind: str, hook: LoadedScenario | None) -> tuple[LoadedTest, ...]:
    """Return a hook's tests under ids that are unique in the scenario."""

    def named(run: TestRun) -> TestRun:
        dependencies = [each.model_copy(update={"id": f"{kind}.{each.id}"}) for each in run.dependencies]
        return run.model_copy(update={"id": f"{kind}.{run.id}", "dependencies": dependencies})

    return tuple(replace(test, run=named(test.run)) for test in (hook.tests if hook else ()))


def _find_hook(name: str | None, directory: Path, warn: Warn | None) -> LoadedScenario | None:
    """Return the hook with this name: a scenario in the directory, whose tests are in its subdirectory `test`."""
    for path in sorted(directory.glob("*.toml")) if name else ():
        if read_toml(path).data.get("name") == name:
            tests = directory / "test"
            return _load_tests(path, find_test_files(tests if tests.is_dir() else None), warn)
    return None


def _node_check(name: str, source: TomlSource, files: TestFiles, warn: Warn | None, hook_dir: Path) -> LoadedTest:
    where = source.where(("pre_test",))
    if name not in files.by_name:
        near = difflib.get_close_matches(name, files.by_name, n=1)
        tests = f"; of the tests, did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"{where}: {_no_hook(name, hook_dir)}{tests}")
    base = files.find(name, where)
    return LoadedTest(TestRun(id="pre_test", test_name=name), _definition(base.data, base, warn), base.path)


def _no_hook(name: str, directory: Path) -> str:
    return f"no hook {name!r} in {directory}; name its directory with --hook-dir, or use --skip-hooks to run without"


def _templates(hook: LoadedScenario) -> str:
    return ", ".join(dict.fromkeys(template for _, template in hook.foreign))


def _load_test(index: int, run: TestRun, source: TomlSource, base: TomlSource | None, warn: Warn | None) -> LoadedTest:
    prefix = ("Tests", index)
    overrides = _known(run.overrides(), source, prefix, warn)
    if base is None:
        return LoadedTest(run, validate(TestDefinition, overrides, source, prefix), source.path)
    data = _known(base.data, base, (), warn)
    definition = validate(TestDefinition, data, base)
    if overrides:
        definition = validate(TestDefinition, _merge(data, overrides), source, prefix)
    return LoadedTest(run, definition, base.path)


def _definition(data: dict[str, Any], source: TomlSource, warn: Warn | None) -> TestDefinition:
    return validate(TestDefinition, _known(data, source, (), warn), source)


def _known(data: dict[str, Any], source: TomlSource, prefix: KeyPath, warn: Warn | None) -> dict[str, Any]:
    """Drop the unknown keys of `cmd_args`, and warn about each; without `warn`, they are errors later."""
    args, known = data.get("cmd_args"), ResolvedCmdArgs.model_fields
    if warn is None or not isinstance(args, dict):
        return data
    unknown = [name for name in args if name not in known]
    for name in unknown[:_MOST_WARNINGS]:
        warn(f"{source.where((*prefix, 'cmd_args', name))}: unknown key, left out; {suggest_field(name, known)}")
    if more := unknown[_MOST_WARNINGS:]:
        warn(f"{source.where((*prefix, 'cmd_args'))}: {counted(len(more), 'more unknown key')} left out")
    return {**data, "cmd_args": {name: value for name, value in args.items() if name in known}}


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge overrides into a definition; tables merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both_tables else value
    return merged


def validate(model: type[M], data: Any, source: TomlSource, prefix: KeyPath = ()) -> M:
    """Build `model` from the data at `prefix` of `source`; BadInput has one line per mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join(explain(error, model, data, source, prefix))) from None
