"""`mbridge status`, `cancel` and `logs`: for a run that another process may hold."""

import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cloudai_mbridge.errors import BadInput, InUse, ToolFailure, shown
from cloudai_mbridge.launch.claim import claimed_by, process_of
from cloudai_mbridge.models.toml_source import suggest
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.plan.launchers import launcher_of
from cloudai_mbridge.plan.read import is_of_dry_run, read_plan_data, refuse_dry_run, require_directories
from cloudai_mbridge.runner import lock
from cloudai_mbridge.runner.journal import Event, Journal, JournalEntry, SubmissionLog, read_entries
from cloudai_mbridge.runner.lock import has_driver, no_driver
from cloudai_mbridge.runner.observe import Observed, journal_time

_CANCEL_WAIT_S = 600.0


@dataclass(frozen=True)
class RunState:
    """State of one run."""

    key: str
    state: str
    job_id: str
    nodes: str
    num_attempts: int
    why: str
    is_open: bool = True


@dataclass(frozen=True)
class RunStatus:
    """State of a run. runs: of its points. held_by: the process that drives it. is_open: some have not ended.

    as_of: the time of the states, UTC; None if unknown. trouble: why the scheduler did not report newer ones, else "".
    counts: runs by state. excluded_nodes: name -> why. events: none without --events.
    left_out: points that were not chosen to run.
    """

    path: Path
    scenario: str
    is_dry_run: bool
    is_open: bool
    held_by: str | None
    counts: Mapping[str, int]
    runs: tuple[RunState, ...]
    excluded_nodes: Mapping[str, str]
    events: tuple[Event, ...]
    damage: tuple[str, ...]
    left_out: int
    as_of: datetime | None = None
    trouble: str = ""

    @property
    def driver_text(self) -> str:
        """As `Observed.driver_text`."""
        return Observed(self.held_by, self.as_of, trouble=self.trouble).driver_text

    @property
    def driver(self) -> str | None:
        """As `held_by`."""
        return self.held_by

    @property
    def excluded(self) -> Mapping[str, str]:
        """As `excluded_nodes`."""
        return self.excluded_nodes


def read_status(root: Path, *, with_events: bool = False, observed: Observed | None = None) -> RunStatus:
    """Read the journal, and where its jobs stand. observed: default: as the journal has them.

    BadInput: the directory is not a run directory, or is unreadable.
    """
    plan = read_plan_data(root)
    is_dry_run, path = is_of_dry_run(root, plan), root / ROOT_FILES.journal
    entries: Mapping[str, JournalEntry] = {}
    excluded: Mapping[str, str] = {}
    events, damage = tuple[Event, ...](), tuple[str, ...]()
    if is_dry_run or not path.exists():
        driver = has_driver(root)
        if driver is None and (root / ROOT_FILES.driver_lock).exists():
            damage = (f"{path}: is missing although mbridge has started this run; {_remedy(root)}",)
    else:
        with Journal.read_only(path) as journal:
            entries, excluded = journal.entries(), journal.excluded()
            events = tuple(journal.events()) if with_events else ()
        driver = has_driver(root)
        damage = tuple(f"{path}: {entry.key}: {text}" for entry in entries.values() for text in entry.damage)
        if driver is None and SubmissionLog(root).proves_loss(entries.values()):
            damage = (f"{path}: is empty although jobs were submitted; {_remedy(root)}", *damage)
    if observed is None:
        observed = Observed(driver, journal_time(root, driver))
    entries = observed.applied_to(entries)
    runs = tuple(_state(run["key"], entries.get(run["key"])) for run in plan["runs"])
    return RunStatus(
        path=root,
        scenario=plan["scenario"],
        is_dry_run=is_dry_run,
        is_open=any(run.is_open for run in runs),
        held_by=driver,
        counts=Counter(run.state for run in runs),
        runs=runs,
        excluded_nodes=excluded,
        events=events,
        damage=damage,
        left_out=len(plan.get("left_out", ())),
        as_of=observed.at,
        trouble=observed.trouble,
    )


def _remedy(root: Path) -> str:
    """Return how a run gets its journal back."""
    if SubmissionLog(root).read():
        return f"mbridge resume rebuilds it from {ROOT_FILES.submissions}"
    return "restore it from a backup"


def require_resumable(root: Path, lost_hosts: Collection[str] = ()) -> None:
    """Refuse, before anything is written, a directory that `resume` or `cancel` cannot continue.

    lost_hosts: machines that no longer run.
    InUse: another process holds it, or it has processes on another machine.
    BadInput: it is not a run directory, is unreadable, or is a dry run. ToolFailure: it cannot be written.
    """
    plan = read_plan_data(root)
    refuse_dry_run(root, plan)
    with no_driver(root):
        pass
    require_directories(root, [run["key"] for run in plan["runs"]])
    entries = read_entries(root)
    log = SubmissionLog(root)
    ended = {one.token for entry in entries.values() for one in entry.attempts if one.ended_at is not None}
    going = {each.token for each in log.read() if not each.is_withdrawn} - ended
    if (original := log.original_of(going)) is not None:  # both would act on the same jobs
        raise BadInput(f"{root}: is a copy of {original}, whose jobs have not ended; resume or cancel that directory")
    known = ("", socket.gethostname(), *lost_hosts)
    in_journal = {(entry.key, attempt.token): attempt for entry in entries.values() for attempt in entry.attempts}
    for logged in log.read():  # from here each process of another machine seems to have been killed
        attempt = in_journal.get((logged.key, logged.token))
        if logged.is_withdrawn or logged.host in known or (attempt is not None and attempt.ended_at is not None):
            continue
        job_id = (attempt and attempt.job_id) or claimed_by(root / logged.key, logged.token) or ""
        if process_of(job_id) is not None:
            raise InUse(
                f"{root}: {logged.key} is a process on {shown(logged.host)}; resume or cancel the run there,"
                f" or, if that machine no longer runs, add --lost-host {shown(logged.host)}"
            )
    require_writable_run(root)


def require_writable_run(root: Path) -> None:
    """Raise ToolFailure of a directory that this user may not write."""
    kept = [root / name for name in (ROOT_FILES.journal, ROOT_FILES.driver_lock, ROOT_FILES.submit_lock)]
    for path in [root, *(path for path in kept if path.exists())]:
        if not os.access(path, os.W_OK):
            raise ToolFailure(f"{path}: is read-only for this user; make it writable")


def _state(key: str, entry: JournalEntry | None) -> RunState:
    last = entry.last if entry else None
    status = last.status if last else None
    if entry is None or (last is None and entry.verdict is None):
        return RunState(key, "waiting", "", "", 0, "")
    state = entry.verdict or ("submitting" if status is None else status.state.lower())
    why = "; ".join(entry.reasons) if entry.verdict else (status.reason if status else "")
    job_id = (last.job_id or "") if last else ""
    nodes = status.nodes if status else ""
    return RunState(key, state, job_id, nodes, len(entry.attempts), why, is_open=entry.verdict is None)


def cancel_run(root: Path) -> bool:
    """Request the driver of a directory to cancel everything, and wait until it has ended; False without a driver.

    ToolFailure: the driver does not end.
    """
    if (driver := has_driver(root)) is None:
        return False
    end = time.monotonic() + _CANCEL_WAIT_S
    while has_driver(root) is not None:
        lock.request_cancel(root)  # each time: a starting driver removes earlier requests
        if time.monotonic() > end:
            raise ToolFailure(f"{root}: {driver} has not ended in {_CANCEL_WAIT_S:.0f} s")
        time.sleep(0.2)
    lock.clear_cancel(root)
    return True


def find_log(root: Path, point: str, attempt: int | None, *, stderr: bool) -> Path:
    """Return the log of a run, named by its key or by a unique part of it.

    BadInput: no such run or attempt, or the name is ambiguous.
    """
    plan = read_plan_data(root)
    if plan.get("dry_run"):
        refuse_dry_run(root, plan)
    runs = {run["key"]: run for run in plan["runs"]}
    name = point.strip("/")
    named = [key for key in runs if key.rpartition("/")[0] == name or key.split("/")[1] == name]
    candidates = [name] if name in runs else named or [key for key in runs if name in key]
    if not candidates:
        raise BadInput(f"POINT: no run {name!r}; {suggest(name, list(runs))}")
    if len(candidates) > 1:
        examples = ", ".join(candidates[:5])
        raise BadInput(
            f"POINT: {name!r} is ambiguous: it matches {len(candidates)} runs: {examples}; give more of its name"
        )
    key = candidates[0]
    directory = root / key
    entry = read_entries(root).get(key)
    last = entry.last.number if entry and entry.last else 1
    if attempt is not None and not 1 <= attempt <= last:
        raise BadInput(f"{key}: has no attempt {attempt}, the last is {last}")
    if attempt is not None and attempt < last:
        directory /= POINT_FILES.attempt.format(attempt)
    return directory / (POINT_FILES.stderr if stderr else launcher_of(runs[key].get("upstream")).log_name)
