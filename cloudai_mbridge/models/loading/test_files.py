"""The test TOMLs of a directory, by the name of the test."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, shown
from cloudai_mbridge.models.loading.explain import suggest
from cloudai_mbridge.models.loading.toml_source import TomlSource, read_toml
from cloudai_mbridge.models.test_definition import TEMPLATE

TEMPLATE_KEY = "test_template_name"
_ALIKE = 0.85  # similarity of spellings; MegatronRun, the nearest name in CloudAI, is at 0.64


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


def template_of(source: TomlSource, prefix: tuple[str | int, ...] = ()) -> str:
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
    """Read the TOMLs below a directory. Systems, scenarios and files without a name are skipped.

    BadInput: no such directory, or invalid TOML, unless that is to be skipped.
    """
    if directory is None:
        return TestFiles(None, {})
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory; --tests-dir takes the directory of the test TOMLs")
    by_name: dict[str, list[TomlSource]] = {}
    for path in sorted(directory.rglob("*.toml")):
        if not path.is_file():
            continue
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
