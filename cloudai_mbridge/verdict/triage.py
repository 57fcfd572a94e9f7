"""Find the cause of a failed run, from the lines of its logs and from the state of its job.

The catalogue of failures is data: `failures.toml`, in order of priority; its head explains the format.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from cloudai_mbridge.files.regular import is_empty, open_regular, pass_hole
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.schedulers.slurm.commands import base_state
from cloudai_mbridge.training.credentials.scrub import redacted
from cloudai_mbridge.training.process.log_lines import RUN_MARK, STEP_MARK

_LONGEST_LINE = 1 << 16
_SEARCHED_END = 1 << 25  # a flood of errors is searched at a few MB/s: at most a minute, whatever its size
_BLOCK = 1 << 20
_MAX_EVIDENCE = 5
_LONGEST_EVIDENCE = 500
_MAX_NODES = 64
# A line without any of these matches no entry. Looking for bytes first is many times faster than matching them all,
# and a healthy log has few such lines.
_WORDS = tuple(
    (
        b"error|fail|exception|exceeded|denied|unknown|invalid image|unauthorized|gated repo|xid (|fallen off|"
        b"gpu is lost|cuda-capable|out of memory|shared memory|allocate memory|enough memory|killed|signal|"
        b"segmentation|due to |cancelled at|prolog|launch|command not found|no such file|no module named|no space|"
        b"stale|in use|endpoint|assert|quota|found nan|found inf|unexpected result|training stopped|timed out|"
        b"timeout|retry counter|connection |got completion|got async|too old|no kernel image|toomany|curl:|"
        b"can't open|no cuda|: not found|cannot execute|pyxis: |enroot|duplicate gpu|mismatched|no socket interface|"
        b"heartbeat monitor|watchdog|broken pipe|connect call|not working|httpx|srun: |ncclinvalid"
    ).split(b"|")
)
_RECORD = re.compile(rf"(?:{RUN_MARK}|{STEP_MARK}) \{{.*", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_LABELS = re.compile(r"^(?: {0,5}\d{1,6}:\s|\[[\w-]{1,40}\]:\s?)+")
# A line of what starts the ranks: Slurm on the node, pyxis and enroot, the job's script, the shell that starts torchrun
_STARTER = re.compile(
    r"^(?:slurmstepd|slurmd)(?:-(?P<node>[\w.-]{1,64}))?: (?:error|fatal): (?!\*\*\* )"
    r"|^(?:pyxis: |enroot[\w-]{0,20}: |\[ERROR\] |node: line \d|\S{0,300}/slurm_script: line \d)"
    r"|^srun: (?:fatal: |unrecognized option |error: (?:pyxis: |(?:Task|Application|task \S{1,40}) launch ))"
)
_PLACE = re.compile(r"^[^:]{1,300}:\d+: ")  # of a line of evidence
_TASKS = "rank_failed"  # the entry whose lines are srun's about tasks that failed, with their nodes


class FailureKind(StrEnum):
    """Whose fault it is: an infrastructure failure is tried again on other nodes, an application failure is not."""

    INFRASTRUCTURE = "infrastructure"
    APPLICATION = "application"


@dataclass(frozen=True)
class KnownFailure:
    """A cause of failures in the catalogue, with its remedy."""

    id: str
    kind: FailureKind
    title: str
    remedy: str


@dataclass(frozen=True)
class Failure(KnownFailure):
    """Cause of a failed run.

    evidence: up to five lines as "FILE:LINE: TEXT". nodes: host names or host lists that the evidence blames.
    """

    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry(KnownFailure):
    """One `[[failure]]` of the catalogue."""

    patterns: tuple[re.Pattern[str], ...]
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()
    everywhere: re.Pattern[str] | None = None

    def search(self, text: str) -> re.Match[str] | None:
        """Return the match of the entry in a line without colours and labels."""
        return next((match for pattern in self.patterns if (match := pattern.search(text))), None)


@dataclass(frozen=True)
class EndState(KnownFailure):
    """One `[[state]]` of the catalogue: a state of a job that explains its end."""

    state: str
    topic: str = ""
    wins: bool = False
    reason: re.Pattern[str] | None = None
    examples: tuple[str, ...] = ()
    never_started: bool = False

    def tells(self, status: JobStatus) -> bool:
        """Return whether a job ended in this state, and for this entry's reason."""
        text = f"{status.reason}; signal {status.signal or 0}"
        return base_state(status.state) == self.state and (self.reason is None or self.reason.search(text) is not None)


_OTHER_INFRASTRUCTURE = EndState(
    state="",
    id="job_infrastructure",
    kind=FailureKind.INFRASTRUCTURE,
    title="The scheduler ended the job",
    remedy="look the state up in sacct(1); retry it on other nodes",
    wins=True,
)
_LOST = EndState(
    state="",
    id="job_lost",
    kind=FailureKind.APPLICATION,
    title="How the job ended is unknown",
    remedy="look for it in the scheduler's logs and queue before you run it again",
    topic="cancelled",  # which mbridge does itself when it gives a job up
)


def triage(status: JobStatus | None, paths: Sequence[Path]) -> Failure | None:
    """Return the cause of a run that did not succeed, None if no entry matches.

    A line is assigned to the first entry that it matches. Some states of the job override the logs: logs of a job on a
    dead node show only symptoms.
    """
    evidence: dict[str, list[str]] = {}
    nodes: dict[str, dict[str, None]] = {}
    for path in paths:
        for number, text in _suspects(path):
            for entry in load_catalogue():
                if match := entry.search(text):
                    lines = evidence.setdefault(entry.id, [])
                    if len(lines) < _MAX_EVIDENCE:
                        lines.append(_evidence(path, number, text, match))
                    named = nodes.setdefault(entry.id, {})
                    starter = _STARTER.search(text)
                    node = match.groupdict().get("node") or (starter and starter["node"])
                    if node and len(named) < _MAX_NODES:
                        named[node] = None
                    break
    state = _state_of(status)
    for entry in load_catalogue():
        if state is not None and (state.wins or entry.id == state.topic):
            break  # it overrides this entry and all below
        if entry.id in evidence:
            lines = evidence[entry.id]
            of_tasks = nodes.get(_TASKS, ()) if any(map(_is_of_a_starter, lines)) else ()
            return failure_of(entry, lines, nodes[entry.id] or of_tasks)
    if state is None:
        return None
    return failure_of(state, evidence.get(state.topic, ()), nodes.get(state.topic, ()))


def _evidence(path: Path, number: int, text: str, match: re.Match[str]) -> str:
    """Return "FILE:LINE: TEXT", for a long line the part around the match. Credentials are removed before cutting."""
    before = len(redacted(text[: match.start()]))
    start = 0 if match.end() < _LONGEST_EVIDENCE // 2 else max(0, before - 100)
    return printable(f"{path.name}:{number}: {redacted(text)[start : start + _LONGEST_EVIDENCE]}")[:_LONGEST_EVIDENCE]


def load_catalogue() -> tuple[Entry, ...]:
    """Return the entries in their order of priority."""
    return _catalogue()[0]


def load_states() -> tuple[EndState, ...]:
    """Return the job states that are themselves a cause of failure."""
    return _catalogue()[1]


@cache
def _catalogue() -> tuple[tuple[Entry, ...], tuple[EndState, ...]]:
    return parse_catalogue((resources.files("cloudai_mbridge.verdict") / "failures.toml").read_text(encoding="utf-8"))


_Known = TypeVar("_Known", bound=KnownFailure)


def parse_catalogue(text: str) -> tuple[tuple[Entry, ...], tuple[EndState, ...]]:
    """Parse the entries and the states of a catalogue's text.

    ValueError: a key is missing or unknown, an id is duplicate, a kind is unknown, or a pattern does not compile.
    """

    def parsed(kind: type[_Known], table: Mapping[str, Any]) -> _Known:
        try:
            more: dict[str, Any] = {key: tuple(table[key]) for key in ("examples", "counterexamples") if key in table}
            if kind is Entry:
                more["patterns"] = tuple(map(re.compile, table["patterns"]))
                if "everywhere" in table:
                    more["everywhere"] = re.compile(table["everywhere"])
            elif "reason" in table:
                more["reason"] = re.compile(table["reason"])
            return kind(**{**table, **more, "kind": FailureKind(table["kind"])})
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise ValueError(f"failures.toml: {table.get('id', 'an entry without id')}: {error}") from error

    data = tomllib.loads(text)
    entries = tuple(parsed(Entry, table) for table in data.get("failure", ()))
    states = tuple(parsed(EndState, table) for table in data.get("state", ()))
    ids = [entry.id for entry in entries] + [state.id for state in states]
    if twice := {id_ for id_ in ids if ids.count(id_) > 1}:
        raise ValueError(f"failures.toml: ids that appear twice: {sorted(twice)}")
    if lost := {state.topic for state in states if state.topic} - {entry.id for entry in entries}:
        raise ValueError(f"failures.toml: topics that are not failures: {sorted(lost)}")
    return entries, states


def _state_of(status: JobStatus | None) -> EndState | None:
    if status is None or status.job_class is JobClass.SUCCEEDED:
        return None
    if status.job_class is JobClass.LOST:
        return _LOST
    other = _OTHER_INFRASTRUCTURE if status.job_class is JobClass.INFRASTRUCTURE else None
    return next((state for state in load_states() if state.tells(status)), other)


def has_never_started(status: JobStatus | None) -> bool:
    """Return whether a job's final state shows that it never started."""
    state = _state_of(status)
    return state is not None and state.never_started


def accuses_its_node(failure: Failure, *, needs_starter: bool = False) -> bool:
    """Return whether a job that could not start because of a failure might have started on another node.

    An infrastructure failure accuses the node of any line; an application failure only if it was what starts the ranks
    that wrote it: a mount or a file may be missing on one node. needs_starter: so must an infrastructure failure.
    """
    entry = next((entry for entry in load_catalogue() if entry.id == failure.id), None)
    if entry is None or any(entry.everywhere and entry.everywhere.search(_text(line)) for line in failure.evidence):
        return False
    is_enough = failure.kind is FailureKind.INFRASTRUCTURE and not needs_starter
    return is_enough or any(map(_is_of_a_starter, failure.evidence))


def is_of_the_script(failure: Failure) -> bool:
    """Return whether the job's script wrote the evidence: it runs on the first of the job's nodes."""
    return any("/slurm_script: line " in line for line in failure.evidence)


def _is_of_a_starter(line: str) -> bool:
    return _STARTER.search(_text(line)) is not None


def _text(line: str) -> str:
    """Return the text of a line of evidence."""
    return _PLACE.sub("", line, count=1)


def failure_of(known: KnownFailure, evidence: Iterable[str], nodes: Iterable[str] = ()) -> Failure:
    """Return a known failure with its evidence."""
    return Failure(known.id, known.kind, known.title, known.remedy, tuple(evidence), tuple(nodes))


def _suspects(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the lines that may match, including text overwritten by a progress bar."""
    for number, line in _lines(path):
        if not any(map(line.lower().__contains__, _WORDS)):
            continue
        # Records quote the run's configuration; text of another rank before a record on the same line is kept
        text = _RECORD.sub("", _COLOUR.sub("", line.decode("utf-8", errors="replace")))
        for part in text.split("\r"):
            yield number, _LABELS.sub("", part).rstrip()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of a file; only the beginning of a very long line, only the two ends of a huge file."""
    with suppress(OSError), open_regular(path) as log:
        size, number = log.seek(0, 2), 0
        log.seek(0)
        while line := log.readline(_LONGEST_LINE):
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = log.readline(_LONGEST_LINE)
                if is_empty(rest):
                    pass_hole(log)
            yield number, line
            if _SEARCHED_END < log.tell() < size - _SEARCHED_END:
                number += _pass_over(log, size - _SEARCHED_END)


def _pass_over(log: BufferedReader, end: int) -> int:
    """Skip to the first line that begins after `end`; return the number of lines skipped."""
    count = 0
    while (left := end - log.tell()) > 0 and (block := log.read(min(left, _BLOCK))):
        count += block.count(b"\n")
        if is_empty(block):
            pass_hole(log)
    return count + log.readline().count(b"\n")
