"""Write a baseline as text with a reviewable diff, and only over the file that it was made from."""

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.documents import inline, one_per_line, render_toml
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.gate.baseline.model import Baseline, BaselinePoint, BaselineRun, value_to_toml
from cloudai_mbridge.gate.results.values import METRICS


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file, None if it is missing."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); give the path of a baseline file") from None


def replace_if_unchanged(path: Path, old: bytes | None, new: bytes) -> bool:
    """Write `new` if the file holds `old` (None: is missing), and return whether it was written.

    A process killed in between leaves the old file intact; concurrent writers take turns.

    ToolFailure: the file cannot be written.
    """
    target = path.resolve()  # a link is kept, and its target replaced
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if read_bytes(target) != old:
                return False
            for left in target.parent.glob(f".{glob.escape(target.name)}.*.new"):  # left by a killed process
                left.unlink(missing_ok=True)
            with replacing(target, durable=True) as unfinished:
                unfinished.write_bytes(new)
    except OSError as error:
        raise ToolFailure(f"{path}: cannot be written ({error.strerror or error}); the old file is unchanged") from None
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file and remove it at the end, so that it is never left next to version-controlled files."""
    is_held = False
    while not is_held:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if is_held := _is_at(file.fileno(), path):
                try:
                    yield
                finally:  # while it is held: a waiting process sees that it is gone, and locks a new one
                    path.unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def render_baseline(baseline: Baseline) -> str:
    """Return the file's text: equal baselines give equal texts.

    BadInput: a text contains half of a surrogate pair, which cannot be encoded.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `mbridge baseline promote`. Change it with that, and review the diff."))
    document.add("version", tomlkit.item(baseline.version))
    points = tomlkit.aot()
    for point in sorted(baseline.points, key=lambda point: point.point):
        points.append(_point(point))
    document.add("points", points)
    return render_toml(document)


def _point(point: BaselinePoint) -> Table:
    head = point.model_dump(exclude={"metrics", "runs", "comparability", "environment"}, exclude_none=True)
    if not point.accepted:
        del head["accepted"]
    metrics = sorted(point.metrics, key=lambda metric: list(METRICS).index(metric.name))
    runs = sorted(point.runs, key=lambda run: (run.ended_at, run.run_id))
    table = tomlkit.table()
    table.trivia.indent = "\n"
    table.update(head)
    table.add("metrics", one_per_line(metric.model_dump(mode="json", exclude_none=True) for metric in metrics))
    table.add("runs", one_per_line(map(_run, runs)))
    table.add("comparability", _table({name: value_to_toml(value) for name, value in point.comparability.items()}))
    if point.environment:
        table.add("environment", _table(point.environment))
    return table


def _run(run: BaselineRun) -> Mapping[str, Any]:
    values = {name: run.values[name] for name in METRICS if name in run.values}
    return {**run.model_dump(exclude={"values"}), "values": values}


def _table(facts: Mapping[str, Any]) -> Table:
    """Return a sorted table; nested tables get lines of their own, except { json = ... }."""
    table = tomlkit.table()
    table.trivia.indent = "\n"
    for name, value in sorted(facts.items()):
        is_table = isinstance(value, dict) and list(value) != ["json"]
        table.add(name, _table(value) if is_table else inline(value))
    return table
