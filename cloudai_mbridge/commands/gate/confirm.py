"""Rerun points that a gate could not decide, on other nodes if there are enough.

The new runs are further iterations in a directory of their own, rendered from the contents of the first directory. If
this mbridge would write any file differently, nothing is run: the results could not be judged together.
"""

import contextlib
import json
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge import pipeline
from cloudai_mbridge.errors import BadInput, InUse, MBridgeError
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.files.run_files import record_run
from cloudai_mbridge.launch.write import create_root
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.toml_source import read_toml, suggest
from cloudai_mbridge.pipeline import Prepared
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.build import assign_arrays
from cloudai_mbridge.runner import Journal, Observer, control
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.schedulers.interface import Scheduler

ObserverFor = Callable[[ScenarioPlan, Path], AbstractContextManager[Observer]]


def confirm(
    root: Path, points: Collection[str], repeats: int, observer_for: ObserverFor, slow_nodes: Collection[str] = ()
) -> tuple[Path, tuple[str, ...]]:
    """Run each point (test_id/label) of the finished run in `root` `repeats` more times, and report in a new directory.

    Return this directory, and what a reader should know of its runs.

    observer_for: returns the observer of the runs, given the new plan and its directory. slow_nodes: avoided as well.

    BadInput: no such run or point, a run that has not ended, missing credentials, changed files. Nothing was run.
    MBridgeError: as `pipeline.execute`; even then, the report is written as far as possible.
    """
    prepared, excluded = prepare(root.resolve(), points, repeats, slow_nodes)
    new = create_root(prepared.output_dir, f"{prepared.plan.scenario}-confirm", datetime.now(UTC))
    with contextlib.closing(Journal(new / ROOT_FILES.journal)) as journal:  # before the plan, which makes it resumable
        for node, reason in excluded.items():
            journal.exclude(node, reason)
    pipeline.write_into(prepared, new)
    record_run(new)
    with driver_lock(new):
        try:
            with observer_for(prepared.plan, new) as observer:
                observer.notice(f"{repeats} more runs each of {', '.join(dict.fromkeys(points))}: {new}")
                for note in prepared.plan.notes:
                    observer.notice(note)
                pipeline.execute(prepared, new, observer)
        except MBridgeError:
            with contextlib.suppress(MBridgeError, OSError, sqlite3.Error):  # the first error is more informative
                pipeline.report(new)
            raise
        pipeline.report(new)
    return new, prepared.plan.notes


def prepare(
    root: Path, points: Collection[str], repeats: int, slow_nodes: Collection[str] = ()
) -> tuple[Prepared, Mapping[str, str]]:
    """Return the plan of the new runs, and the nodes that no run may use; nothing is written. Raises as `confirm`."""
    if repeats < 1 or not points:
        raise BadInput(f"{root}: {repeats} more runs of {len(points)} points leaves nothing to run; ask for at least 1")
    status = control.read_status(root)
    if status.held_by is not None:
        raise InUse(f"{root}: is held by {status.held_by}; wait for its end")
    if status.is_open:
        count = sum(run.is_open for run in status.runs)
        raise BadInput(f"{root}: {count} of {len(status.runs)} runs have not ended; first: mbridge resume {root}")
    first = pipeline.read(root)
    known = _by_point(first.plan)
    for name in points:
        if name not in known:
            raise BadInput(f"{root}: has no point {name!r}; {suggest(name, list(known))}")
    highest = {name: max(run.iteration for run in runs) for name, runs in known.items()}
    templates = []
    for run in (known[name][0] for name in dict.fromkeys(points)):  # with the settings that only its files contain
        directory = root / run.key
        config = _read_json(directory / run.launcher.config_name) if run.launcher.config_name else {}
        definition = read_toml(directory / POINT_FILES.definition).data
        templates.append(replace(run, definition=definition, training_config=config))
    prepared = replace(first, plan=replace(first.plan, runs=tuple(templates)))
    _require_same_files(prepared, root)
    pipeline.preflight(prepared)
    with Journal.read_only(root / ROOT_FILES.journal) as journal:
        entries, excluded = journal.entries(), journal.excluded()
    used = {
        point: list(dict.fromkeys(node for run in runs if run.key in entries for node in _nodes(entries[run.key])))
        for point, runs in known.items()
    }
    scheduler = pipeline.scheduler_for(first.system, prepared.plan)
    avoided, notes = avoid(templates, first.system, scheduler, used, excluded, slow_nodes)
    runs = tuple(
        repeat(run, highest[_point(run)] + number, avoided[_point(run)], excluded)
        for run in templates
        for number in range(1, repeats + 1)
    )
    plan = replace(
        first.plan,
        runs=assign_arrays(runs, first.system),
        tests=tuple(dict.fromkeys(run.test_id for run in runs)),
        rejected=(),
        num_rejected=0,
        rule_counts={},
        left_out=(),
        notes=(f"further runs of {root.name}", *notes),
    )
    return replace(prepared, plan=plan), excluded


def repeat(template: RunPlan, iteration: int, avoided: Iterable[str], excluded: Iterable[str]) -> RunPlan:
    """Return a run as another iteration without dependencies that avoids nodes.

    excluded: nodes that the runner excludes from its submissions, which do not reach the upstream launcher's jobs.
    """
    run = replace(
        template,
        key=f"{template.key.rpartition('/')[0]}/{iteration}",
        iteration=iteration,
        after_completion=(),
        after_start=(),
        end_with=(),
        array="",
        array_index=0,
        exclude_nodes=tuple(dict.fromkeys((*template.exclude_nodes, *avoided))),
    )
    return run.launcher.avoiding(run, [*avoided, *excluded])


def avoid(
    runs: Iterable[RunPlan],
    system: System,
    scheduler: Scheduler,
    used: Mapping[str, Sequence[str]],
    excluded: Collection[str],
    slow: Collection[str] = (),
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return, by point, the nodes that its new runs avoid, and notes about them.

    used: point -> nodes that its runs had. excluded: nodes that no run may use. slow: nodes that make runs slower.
    """
    avoided, said = {}, dict[str, list[str]]()
    for run in runs:
        avoided[_point(run)], note = _avoid(run, system, scheduler, used.get(_point(run), ()), excluded, slow)
        said.setdefault(note, []).append(_point(run))
        if others := sorted({*run.after_start, *run.end_with}):
            said.setdefault(f"ran beside {', '.join(others)}, and runs without now", []).append(_point(run))
    return avoided, tuple(f"{', '.join(points)}: {note}" for note, points in said.items())


def _avoid(
    run: RunPlan,
    system: System,
    scheduler: Scheduler,
    used: Sequence[str],
    excluded: Collection[str],
    slow: Collection[str],
) -> tuple[tuple[str, ...], str]:
    """Return the nodes that a point's new runs avoid (its earlier nodes, if enough others are usable), and a note."""
    if system.is_one_machine:
        return (), "this is the only machine, so the same one was used"
    if run.nodes:
        return (), f"its scenario names its nodes ({', '.join(run.nodes)}); the same ones were used"
    if not used:
        return (), "the nodes it ran on are unknown; it may run on the same ones"
    taken = {*used, *slow, *excluded, *(name for nodes in run.exclude_nodes for name in expand_hostlist(nodes))}
    if nodes := system.default_nodes:
        taken |= set(scheduler.unhealthy_nodes(",".join(nodes)))
    usable = scheduler.num_usable_nodes(taken)
    if usable is None:
        return (), "the cluster's other nodes are unknown; it may run on the same ones"
    if usable < run.num_nodes:
        return (), "the cluster has no other nodes, so the same ones were used"
    others = tuple(node for node in slow if node not in used)
    more = f", and {', '.join(others)}, which the gate found slow" if others else ""
    return (*used, *others), f"avoids {', '.join(used)}, where its earlier runs were{more}"


def _point(run: RunPlan) -> str:
    return f"{run.test_id}/{run.label}"


def _by_point(plan: ScenarioPlan) -> dict[str, list[RunPlan]]:
    found: dict[str, list[RunPlan]] = {}
    for run in plan.runs:
        if not run.goes_first:
            found.setdefault(_point(run), []).append(run)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_regular(path).decode())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); run the scenario again") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is damaged ({error}); run the scenario again") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: is damaged (no table); run the scenario again")
    return data


def _require_same_files(prepared: Prepared, root: Path) -> None:
    """Raise BadInput unless this mbridge would write the same files, byte for byte."""
    with tempfile.TemporaryDirectory() as directory:
        again = Path(directory)
        pipeline.write_into(prepared, again)
        for run in prepared.plan.runs:
            for path in sorted((again / run.key).iterdir()):
                ran, text, was = root / run.key / path.name, path.read_bytes(), None
                with contextlib.suppress(OSError):
                    was = read_regular(ran, len(text))
                if was != text:
                    raise BadInput(
                        f"{ran}: differs from what this mbridge writes, so a further run of {_point(run)} cannot be"
                        " compared with it; run the scenario again"
                    )


def _nodes(entry: JournalEntry) -> list[str]:
    """Return the nodes of all attempts of a run; an invalid node list, as a log may contain, is ignored."""
    found: list[str] = []
    for attempt in entry.attempts:
        if attempt.status is not None:
            with contextlib.suppress(BadInput):
                found += expand_hostlist(attempt.status.nodes)
    return sorted(set(found))
