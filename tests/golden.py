"""Golden files: what the product says and writes, checked against files that `make golden` writes again.

`sentence(caught)` and `sentence(result.stderr)` check a whole text against `tests/sentences.txt`, which has the texts
of each test, in order, under its node id. The test itself asserts what a user's script can rely on: the class of an
error, the place, the id of a rule, the exit code. `golden_file(path, text)` checks a file of its own.

With `MBRIDGE_WRITE_GOLDEN=1` a session runs only the tests that use golden files, and writes: texts of tests that
passed are replaced, those of tests that are gone are dropped where all of their file was collected, and the others
stay. Workers note in a common directory what their tests said; who has made it writes the file at the end.
"""

import difflib
import itertools
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

FILE = "tests/sentences.txt"
WRITE = "MBRIDGE_WRITE_GOLDEN"
DIRECTORY = "TEST_GOLDEN"  # of the notes, for workers
RUN_TIME = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"  # in the names of runs that a test has started
HEAD = "# What tests have seen of the product's messages. Written by `make golden`: see tests/golden.py\n"
Entries = dict[str, list[str]]
Sentence = Callable[..., None]
GoldenFile = Callable[..., None]
_SAID = pytest.StashKey[list[str]]()
_FIXTURES = {"sentence", "golden_file"}
_PLACES = {str(Path(__file__).parents[1]): "<repository>", str(Path.home()): "<home>"}
# Words that messages repeat and other packages choose, each release its own: not for the golden file
_FOREIGN = {
    r"Input should be [^;)\n]*|Extra inputs are not permitted": "<pydantic>",
    r"(?:Expecting|Extra data|Unterminated|Invalid) [^\n]*?\(char \d+\)": "<json>",
    r"(?<=not valid TOML: )[^;\n]*\(at [^)]*\)": "<toml>",
    r"(?<=Invalid value for )('[^']*': '?[^\s']*'?) is not (?:in the range|a valid|one of)\b[^\n]*": r"\1 <click>",
    r"\b(?:Missing|No such) (?:option|argument)[: ]*('[^']*')[^\n]*": r"<click> \1",
    r"(?<=valid keys of )(\w+): [\w, ]*\w(?: \.{3} \(\d+ characters left out\) \.{3} [\w, ]*\w)?": r"\1: <keys>",
}
_SHORTEST_PLACE = 2  # the home of some users is "/"


@pytest.fixture
def sentence(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sentence:
    """Check a text, or what an error says, against `tests/sentences.txt`; one test may check several.

    What differs between runs, such as a duration, is named: `sentence(text, seconds=r"[0-9.]+ s")` keeps `<seconds>`.
    """
    said = request.node.stash.setdefault(_SAID, [])

    def say(what: Any, **varying: str) -> None:
        text = plain(_text(what), tmp_path_factory.getbasetemp())
        for name, pattern in varying.items():
            text = re.sub(pattern, f"<{name}>", text)
        said.append(without_host(text))

    return say


@pytest.fixture
def golden_file(request: pytest.FixtureRequest) -> GoldenFile:
    """Check a text against a file. alike: what two texts must have in common, by default all."""

    def check(path: Path, text: str, alike: Callable[[str], str] = str) -> None:
        known = path.read_text(encoding="utf-8") if path.exists() else ""
        if alike(text) == alike(known):
            return
        if os.environ.get(WRITE):
            path.write_text(text, encoding="utf-8")
        else:
            _fail(request.node, path.name, alike(known), alike(text))

    return check


def plain(text: str, temporary: Path) -> str:
    """Return a text without what depends on the machine, the session or other packages' releases.

    temporary: pytest's directory of all tests.
    """
    session = temporary.parent if re.fullmatch(r"(popen-)?gw\d+", temporary.name) else temporary
    # With the directory of a case of tests/cases.py
    of_a_test = r"(?:/(?:popen-)?gw\d+)?/[\w.-]*\d(?:/\d+(?=[/:;,'\"\s]|$))?"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    text = re.sub(rf"{re.escape(str(session))}(?:{of_a_test})?(?=\W|$)", "<tmp>", text)
    text = re.sub(rf"(?:/tmp|{re.escape(tempfile.gettempdir())})/(?:tmp|mb[\w-]*-)\w{{8}}(?=\W|$)", "<tmp>", text)
    for place, name in ((sys.prefix, "<environment>"), *_PLACES.items()):
        if len(place) > _SHORTEST_PLACE:
            text = re.sub(rf"{re.escape(place)}(?=\W|$)", name, text)
    for pattern, name in _FOREIGN.items():
        text = re.sub(pattern, name, text)
    text = re.sub(r"\b(process|pid) \d+", r"\1 <pid>", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}", "<address>", text)
    text = re.sub(r"(?<=\bas of )\d\d:\d\d:\d\d(?= UTC)", "<time>", text)
    text = re.sub(r"\b(localhost|127\.0\.0\.1):\d+", r"\1:<port>", text)
    text = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))


def without_host(text: str) -> str:
    """Hide the name of the host, in known texts too: it may be a word of them."""
    return re.sub(rf"\b{re.escape(socket.gethostname())}(?=\W|$)", "<host>", text)


def parse(text: str) -> Entries:
    """Read `sentences.txt`: node ids, then the texts of all of them, each with a dash and indented."""
    entries: Entries = {}
    nodes: list[str] = []
    texts: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("  -"):
            texts.append(line[4:])
        elif texts and (not line or line.startswith("    ")):
            texts[-1] += f"\n{line[4:]}"
        elif line and not line.startswith("#"):
            if texts:
                nodes, texts = [], []
            nodes.append(line)
            entries |= dict.fromkeys(nodes, texts)
    return {node: list(texts) for node, texts in entries.items()}


def render(entries: Mapping[str, list[str]]) -> str:
    """Return the text of `sentences.txt`; neighbouring cases of a test with the same texts share them."""

    def shared(entry: tuple[str, list[str]]) -> tuple[str, list[str]]:
        return entry[0].partition("[")[0], entry[1]

    lines: list[str] = []
    for (_, texts), cases in itertools.groupby(sorted(entries.items()), shared):
        lines += [node for node, _ in cases]
        for text in texts:
            lines += [f"{'  - ' if number == 0 else '    '}{line}" for number, line in enumerate(text.split("\n"))]
    return HEAD + "".join(f"{line.rstrip()}\n" for line in lines)


def _text(what: Any) -> str:
    if isinstance(what, pytest.ExceptionInfo):
        what = what.value
    if isinstance(what, ValidationError):  # the words of our validators; pydantic's are its own
        return "\n".join(str(each["ctx"]["error"]) for each in what.errors() if each["type"] == "value_error")
    if isinstance(what, pytest.WarningsRecorder):
        return "\n".join(str(warning.message) for warning in what)
    assert isinstance(what, str | BaseException), f"{type(what).__name__} is no text and no error"
    return str(what)


def _fail(item: pytest.Item, name: str, known: str, found: str) -> None:
    lines = difflib.unified_diff(known.split("\n"), found.split("\n"), name, "this test", lineterm="", n=2)
    remedy = f"if that is meant: make golden TESTS={item.nodeid.partition('::')[0]}"
    pytest.fail("\n".join([f"{name} has another text", *lines, remedy]), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Checking(config.rootpath / FILE))
    if os.environ.get(WRITE):
        config.pluginmanager.register(Noting(config.rootpath / FILE))


class _Known:
    """The file, read when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: Entries | None = None

    @property
    def entries(self) -> Entries:
        if self._entries is None:
            self._entries = parse(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        return self._entries


class Checking:
    """Compare what a test said, once it has passed otherwise."""

    def __init__(self, path: Path) -> None:
        self._known = _Known(path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        said = item.stash.get(_SAID, [])
        known = [without_host(text) for text in self._known.entries.get(item.nodeid, [])]
        if os.environ.get(WRITE):
            _note({"node": item.nodeid, "said": said})
        elif said != known:
            _fail(item, FILE, *(render({item.nodeid: texts}).removeprefix(HEAD) for texts in (known, said)))
        return result


class Noting:
    """Choose the tests of a session that writes, and write at its end what they noted."""

    def __init__(self, path: Path) -> None:
        self._path, self._known, self._collected = path, _Known(path), list[str]()
        self._is_owner = DIRECTORY not in os.environ
        if self._is_owner:
            os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="mbridge-golden-")

    @pytest.hookimpl(tryfirst=True)  # before -k and -m leave some out
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        partly = {arg.partition("::")[0] for arg in config.args if "::" in arg}
        _note({"collected": [item.nodeid for item in items if item.nodeid.partition("::")[0] not in partly]})
        used = [item for item in items if self._is_used_by(item)]
        if others := [item for item in items if item not in set(used)]:
            config.hook.pytest_deselected(items=others)
        items[:] = used

    def _is_used_by(self, item: pytest.Item) -> bool:
        return item.nodeid in self._known.entries or not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._is_owner:
            self._write(Path(os.environ[DIRECTORY]))

    def pytest_unconfigure(self) -> None:
        if self._is_owner:
            shutil.rmtree(os.environ.pop(DIRECTORY), ignore_errors=True)

    def _write(self, directory: Path) -> None:
        notes = [json.loads(line) for file in directory.iterdir() for line in file.read_text().splitlines()]
        collected = {node for note in notes for node in note.get("collected", ())}
        files = {_file(node) for node in collected}
        root = self._path.parents[1]
        kept = {
            node: texts
            for node, texts in self._known.entries.items()
            if (node in collected or _file(node) not in files) and (root / _file(node)).exists()
        }
        entries = kept | {note["node"]: note["said"] for note in notes if "node" in note}
        if (text := render({node: texts for node, texts in entries.items() if texts})) != render(self._known.entries):
            self._path.write_text(text, encoding="utf-8")


def _note(note: Mapping[str, Any]) -> None:
    with Path(os.environ[DIRECTORY], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")


def _file(node: str) -> str:
    return node.partition("::")[0]
