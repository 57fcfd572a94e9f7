"""Selection of the tests that a change touches: `pytest --changed [BASE]`, which `make test-changed` runs.

A test runs if

- its file, or a file of tests that it names, has changed or imports a changed module, directly or not;
- it starts processes (marker `process`, which tests/conftest.py puts on all end-to-end tests) and the product has
  changed: what a process imports cannot be seen from its test. Those of the training program, in tests/training, start
  nothing but `cloudai_mbridge.training`, which imports nothing else of the product: import-linter sees to that;
- a file that is no module has changed that lies in a package that it imports, or that it names: `docs`, `conf` ...

A change of what all tests use, and of any file that no rule knows, runs all tests.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.golden import FILE as SENTENCES

ROOT = Path(__file__).parents[1]
PACKAGE = "cloudai_mbridge"
# Of all tests
COMMON = {f"tests/{name}.py" for name in ("conftest", "forked", "workers", "figures", "golden", "changed", "cases")}
# Depended upon by all tests that start processes, without a name in their files: the cluster, and the jobs on it
OF_PROCESSES = ("tests/sandbox/", "tests/stand_in/")
# Files and directories that a test or the product reads by their names; those of the last group only people and CI read
NAMED = {"docs", "conf", "systems", "test_defs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"} | {
    *("Makefile", "LICENSE", ".ci", ".github", ".gitignore", ".oxlintrc.json", ".pre-commit-config.yaml")
}
# Module -> the package of which it imports modules by names that it puts together
ON_DEMAND = {
    "commands.table": "commands",
    "commands.setup.schema": "commands",
    "export": "export.targets",
    "export.targets": "export.targets",
    "training.config": "training.config",
    "training.config.text.classes": "training.config",
}
# The same for the names of Megatron-Bridge in users' scripts: only a test that names the module gets there
SERVED = {"models": "training", "training.upstream": "training"}
READ_BY_COMMANDS = {"conf", "systems", "test_defs"}
_TRAINING = f"{PACKAGE}/training/"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests that changes since BASE touch, committed or not (default: where the branch left main)"
    parser.addoption("--changed", metavar="BASE", nargs="?", const="", help=text)


def pytest_configure(config: pytest.Config) -> None:
    base = config.getoption("--changed")
    if base is not None:
        config.pluginmanager.register(Selecting(changed_files(ROOT, base)))


def changed_files(root: Path, base: str) -> set[str]:
    """Return the files that differ from the commit, those that git does not track yet among them."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise pytest.UsageError(f"--changed: git {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.split("\0") if "-z" in arguments else done.stdout.split()

    (commit,) = git("merge-base", base or "main", "HEAD")
    names = [
        *git("diff", "-z", "--name-only", "--no-renames", commit),
        *git("ls-files", "-z", "--others", "--exclude-standard"),
    ]
    return {name for name in names if name}


class Selecting:
    """The selection of one session."""

    def __init__(self, files: set[str]) -> None:
        self._files, self._has_dropped = files, False

    @pytest.hookimpl(trylast=True)  # after the markers are put
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        selection = Selection(self._files)
        chosen = [item for item in items if selection.has(_file(item), _starts(item), _fixtures(item))]
        if dropped := [item for item in items if item not in set(chosen)]:
            config.hook.pytest_deselected(items=dropped)
            self._has_dropped = True
        items[:] = chosen

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._has_dropped:
            session.exitstatus = pytest.ExitCode.OK  # the change touches no test

    def pytest_report_header(self) -> str:
        why = Selection(self._files).why_all
        return f"changed: {len(self._files)} files" + (f"; all tests run, for {why}" if why else "")


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _starts(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, ("process", "slurm", "long", "drill")))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


class Selection:
    """The tests that changed files touch.

    why_all: the changed file for which all tests run, "" if there is none.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = set(files)
        self._graph = Graph()
        self._modules = {module for file in self._files for module in self._graph.holding(file)}
        self.why_all = next(filter(self._is_unknown, sorted(self._files)), "")

    def has(self, file: str, starts_processes: bool, fixtures: Iterable[str] = ()) -> bool:
        """Return whether the tests of a file run. starts_processes: its test may start some; fixtures: that it uses."""
        if self.why_all or file in self._files:
            return True
        if SENTENCES in self._files and ("sentence" in fixtures or file == "tests/test_golden.py"):
            return True
        if starts_processes and self._touches_processes(file, fixtures):
            return True
        tests, modules, text = self._graph.closure(file)
        return bool(
            self._modules & modules
            or self._files & tests
            or any(_is_beside(changed, file) for changed in self._files)
            or any(_is_named(changed, text) for changed in self._files)
        )

    def _is_unknown(self, file: str) -> bool:
        if file in COMMON:
            return True
        if file.startswith(f"{PACKAGE}/"):
            return not self._graph.holding(file)
        if file.startswith("tests/"):  # a deleted one: what used it is not known
            return not (ROOT / file).exists() and not Path(file).name.startswith("test_")
        return file.partition("/")[0] not in NAMED

    def _touches_processes(self, file: str, fixtures: Iterable[str]) -> bool:
        """Return whether what a test starts may have changed."""
        if any(changed.startswith(OF_PROCESSES) for changed in self._files):
            return True
        is_training = file.startswith("tests/training/") and "mbridge" not in fixtures
        if is_training and '"-m", "cloudai_mbridge"' not in (ROOT / file).read_text():
            return any(changed.startswith(_TRAINING) for changed in self._files)
        return any(changed.partition("/")[0] in {PACKAGE, *READ_BY_COMMANDS} for changed in self._files)


def _is_beside(changed: str, file: str) -> bool:
    """Return whether a changed conftest.py, or a file of data, is that of a test's directory or of one above it."""
    path = Path(changed)
    is_of_directory = path.name == "conftest.py" or (path.suffix != ".py" and changed != SENTENCES)
    above = path.parent if path.parent != Path("tests/data") else Path("tests")
    return changed.startswith("tests/") and is_of_directory and above in Path(file).parents


def _is_named(changed: str, text: str) -> bool:
    """Return whether a text names a changed file that is no module, or the directory at the top that holds it."""
    first = changed.partition("/")[0]
    return first in NAMED and re.search(rf"(?<![\w.]){re.escape(first)}(?!\w)", text) is not None


class Graph:
    """The imports of the product, which grimp reads, and what files of tests name of it and of each other."""

    def __init__(self) -> None:
        import grimp  # the environments of interop lack it

        self._imports = grimp.build_graph(PACKAGE, cache_dir=None)
        self._test_files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
        self._by_name: dict[str, set[str]] = {}  # scripts are started by their names
        for file in self._test_files:
            if not Path(file).name.startswith(("test_", "conftest", "__")):
                self._by_name.setdefault(Path(file).name, set()).add(file)

    def holding(self, file: str) -> set[str]:
        """Return the module that a file is, or all of the package that holds it; nothing if it is not there."""
        path = Path(file)
        if path.parts[0] != PACKAGE or not (ROOT / path).exists():
            return set()
        if path.suffix == ".py":
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            return {name} & self._imports.modules
        while not (ROOT / path / "__init__.py").exists():
            path = path.parent
        return self._within(".".join(path.parts))

    @functools.cache  # noqa: B019 (one graph for a session)
    def closure(self, file: str) -> tuple[set[str], set[str], str]:
        """Return the files of tests that one needs, the modules that they import, and all that they say."""
        tests, waiting = {file}, [file]
        while waiting:
            new = self._needed(waiting.pop()) - tests
            tests |= new
            waiting += new
        modules = {module for each in tests for module in self._named_modules(each)}
        reached = set[str]().union(*map(self._reached, modules))
        return tests, reached, "\n".join((ROOT / each).read_text() for each in sorted(tests))

    @functools.cache  # noqa: B019
    def _needed(self, file: str) -> set[str]:
        """Return the files of tests that one imports, or names with their ending, and the conftest.py above it."""
        text, found = (ROOT / file).read_text(), set[str]()
        for dotted in _dotted("tests", text):
            found |= {f"{dotted.replace('.', '/')}{ending}" for ending in (".py", "/__init__.py")}
        for name in re.findall(r"\b\w+\.py\b", text):
            found |= self._by_name.get(name, set())
        found |= {f"{above}/conftest.py" for above in Path(file).parents}
        return (found & self._test_files) - COMMON

    @functools.cache  # noqa: B019
    def _named_modules(self, file: str) -> set[str]:
        """Return the modules that a file names, in code or in a string that is some."""
        return self._longest_of((ROOT / file).read_text())

    def _longest_of(self, text: str) -> set[str]:
        return {module for dotted in _dotted(PACKAGE, text) for module in self._longest(dotted)}

    def _longest(self, dotted: str) -> set[str]:
        """Return the module of a name; of one in a module that is served and has no file, all of its package."""
        module = dotted
        while module != PACKAGE and module not in self._imports.modules:
            module = module.rpartition(".")[0]
        is_served = module != PACKAGE and dotted.removeprefix(module).count(".") > 1
        return {module} | (self._within(module) if is_served and self._is_package(module) else set())

    @functools.cache  # noqa: B019
    def _reached(self, start: str) -> set[str]:
        """Return what a module imports, directly or not; of packages above it what they import at once, no further."""
        found, waiting = set[str](), [start]
        while waiting:
            if (module := waiting.pop()) in found or (module == PACKAGE != start):
                continue
            found.add(module)
            waiting += self._imports.find_modules_directly_imported_by(module)
            waiting += self._on_demand(module, {**ON_DEMAND, **SERVED} if module == start else ON_DEMAND)
        return found.union(*map(self._above, found))

    def _on_demand(self, module: str, packages: Mapping[str, str]) -> set[str]:
        """Return what a module imports by a name that it has as text, or puts together."""
        package = packages.get(module.removeprefix(f"{PACKAGE}."))
        return self._in_text(module) | (self._within(f"{PACKAGE}.{package}") if package else set())

    @functools.cache  # noqa: B019
    def _in_text(self, module: str) -> set[str]:
        text = self._path(module).read_text()
        named = _dotted(PACKAGE, text) | {f"{PACKAGE}.{name}" for name in re.findall(r'"([\w.]+):\w+"', text)}
        return named & self._imports.modules

    @functools.cache  # noqa: B019
    def _above(self, module: str) -> set[str]:
        """Return the packages above a module, and what they import when they are imported."""
        found = set(_packages(module))
        for package in _packages(module):
            for node in ast.parse(self._path(package).read_text()).body:
                if isinstance(node, ast.ImportFrom | ast.Import):
                    found |= self._longest_of(ast.unparse(node))
        return found

    def _within(self, package: str) -> set[str]:
        return {name for name in self._imports.modules if f"{name}.".startswith(f"{package}.")}

    def _is_package(self, module: str) -> bool:
        return ROOT.joinpath(*module.split(".")).is_dir()

    def _path(self, module: str) -> Path:
        path = ROOT.joinpath(*module.split("."))
        return path / "__init__.py" if self._is_package(module) else path.with_suffix(".py")


def _dotted(package: str, text: str) -> set[str]:
    """Return the dotted names in a package that a text has, those that it imports from it among them."""
    found = set(re.findall(rf"\b{package}(?:\.\w+)+", text))
    for parent, names in re.findall(rf"from ({package}[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        found |= {f"{parent}.{name}" for name in re.findall(r"\w+", names)}
    return found | set(re.findall(rf"^import ({package})\b(?!\.)", text, re.MULTILINE))


def _packages(module: str) -> Iterator[str]:
    while module := module.rpartition(".")[0]:
        yield module
