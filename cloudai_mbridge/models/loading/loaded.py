"""Results of loading a scenario, and the options for its hooks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.scenario import TestRun, TestScenario
from cloudai_mbridge.models.test_definition import TEMPLATE, TestDefinition

HOOK_DIR = Path("conf/hook")  # below the current directory, as in CloudAI


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
    lines = (
        line if path is None or ".toml" in line.partition(": ")[0] else f"{path}: {line}" for line in text.split("\n")
    )
    return "\n".join(lines)


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
class HookOptions:
    """Directory of hooks, and whether they run at all."""

    directory: Path = HOOK_DIR
    skip: bool = False


NO_HOOKS = HookOptions(skip=True)
