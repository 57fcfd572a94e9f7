"""Read a training log as a stream: memory grows with the number of steps, not with the size of the log.

Output of other programs in the log is not taken for a record of the run. The token of the run's job proves a record,
at any place of a line: half a line of a C library may precede it. Other records begin their line, after a rank's label
at most, and count only if no record has the run's token: training loops from before tokens wrote them. A record with
another token never counts.
"""

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from time import time_ns
from typing import Any

from pydantic import StrictInt

from cloudai_mbridge.files.documents import Number, is_deep
from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.logs.pairing import StepLine, numbered
from cloudai_mbridge.training.process.log_lines import RUN_MARK, STEP_MARK

_LONGEST_LINE = 1 << 20
# A line without these tells nothing of a step or a run; colours may stand inside of a word
_WORDS = (b"iteration", b"step time", RUN_MARK.lower().encode(), STEP_MARK.lower().encode(), b"\x1b")
_MOST_STEPS = 10**15
_MOST_RESTARTS = 10
# The optimizer skipped the step for its gradients: it did less work, and its loss is printed as 0
SKIPPED = "skipped by the optimizer"
PROFILED = "profiled"
_REPEATED = "{} steps were logged more than once; the last of each counts"


@dataclass(frozen=True)
class StepRecord:
    """One step of the log; None if the log lacks a value. peak_memory_gib: the largest rank's, so far.

    left_out: why the step is no measurement and is left out of every statistic: SKIPPED or PROFILED; "" if it is one.
    """

    step: StrictInt
    step_time_s: Number | None
    tflops_per_gpu: Number | None
    loss: Number | None
    grad_norm: Number | None = None
    peak_memory_gib: Number | None = None
    left_out: str = ""


@dataclass(frozen=True)
class LogSummary:
    """All steps of a log in order.

    source: "records" if our full-precision records were found, "lines" for Megatron-Bridge's two rounded lines, "none".
    run: the run's own record of its start; of the upstream launcher `first_iteration`, after a checkpoint.
    notes: irregularities of the log. fault: why it cannot be read.
    """

    steps: tuple[StepRecord, ...] = ()
    source: str = "none"
    run: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fault: str = ""


class LogParser:
    """Incremental parser: feed it bytes as they arrive; request a summary at any time."""

    def __init__(self, token: str | None = None, *, has_records: bool = True) -> None:
        """token: of the run's job; None if unknown, and then every record counts.

        has_records: False for the upstream launcher's log, where a record can only come from another program.
        """
        self._token, self._has_records = token, has_records
        self._rest = b""
        self._records: dict[int, StepRecord] = {}
        self._times: list[StepLine] = []
        self._iterations: list[StepLine] = []
        self._run: dict[str, Any] = {}
        self._malformed = self._repeated = self._foreign = 0
        self._restarts: list[int] = []
        self._is_restarted = self._has_own = False

    def feed(self, data: bytes) -> None:
        """Parse more of the log; an unfinished last line is kept until its end arrives."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not _may_tell(line):
                continue
            for part in line.decode("utf-8", errors="replace").split("\r"):  # a progress bar overwrites its line
                self._take(part)
        self._rest = rest[:_LONGEST_LINE]

    @property
    def num_steps(self) -> int:
        """Number of step lines read so far, repeated lines included."""
        return len(self._records) + self._repeated + max(len(self._times), len(self._iterations))

    @property
    def last_step(self) -> int:
        """Highest step so far, 0 before the first."""
        return max(self._records or (line.step for line in self._iterations), default=len(self._times))

    def finish(self) -> LogSummary:
        """Parse the last line even without a line break, and summarize."""
        self.feed(b"\n")
        return self.summary()

    def _take(self, line: str) -> None:
        line = _COLOUR.sub("", line) if "\x1b" in line else line
        if has_record(line) and not self._has_records:
            self._foreign += 1
        elif has_record(line):
            self._take_records(line)
        elif not self._has_records and not self._iterations and (loaded := _LOADED.search(line)):
            self._run = {"first_iteration": int(loaded[1]) + 1}
        starts = [match.start() for match in _PART.finditer(line)]  # ranks' lines may have been joined into one
        for start, end in zip(starts, [*starts[1:], len(line)], strict=False):
            part, at = line[start:end], len(self._times) + len(self._iterations)
            if (pair := match_step_time(part)) is not None:
                self._times.append(StepLine(at, *pair))
            elif (fields := match_iteration(part)) is not None:
                is_skipped = bool(fields["skipped_iterations"])
                loss = math.nan if fields["nan_iterations"] else None if is_skipped else fields["loss"]
                rest = {name: fields[name] for name in ("step", "step_time_s", "tflops_per_gpu", "grad_norm")}
                rest["is_skipped"] = is_skipped
                self._iterations.append(StepLine(at, loss=loss, **rest))

    def _take_records(self, line: str) -> None:
        """Parse every whole record that the run's token proves; without a token, a record that begins its line."""
        found: list[tuple[str, dict[str, Any] | None]] = []
        if self._token is not None and self._token in line:
            marks = islice(_MARK.finditer(line), _MOST_RECORDS)
            found = [(match[1], _decoded(line, match.end())[0]) for match in marks]
        proven = [(mark, record) for mark, record in found if record is not None and self._has_token(record)]
        whole = proven or [(mark, own) for mark in (STEP_MARK, RUN_MARK) if (own := match_record(line, mark))]
        self._malformed += len(found) - len(proven) if proven else not whole
        for mark, record in whole:
            if not self._is_own(record):
                continue
            if mark == STEP_MARK:
                self._take_record(record)
            elif "version" in record:  # a record without a version is not from mbridge
                # if the run has started again, the first start's iteration is that of the log's steps
                begun = {"first_iteration": self._run.get("first_iteration")} if self._records else {}
                self._run = {name: value for name, value in {**record, **begun}.items() if name != "token"}
                self._is_restarted = bool(self._records)

    def _is_own(self, record: dict[str, Any]) -> bool:
        """Return whether a record is of this run; count it if not. The first proven record drops those before it."""
        if self._token is None:
            return True
        is_own = self._has_token(record)
        if is_own and not self._has_own:
            self._has_own = True
            self._foreign += len(self._records) + self._repeated + bool(self._run)
            self._records, self._run, self._restarts, self._repeated = {}, {}, [], 0
            self._is_restarted = False
        if not is_own and (self._has_own or record.get("token") is not None):
            self._foreign += 1
            return False
        return True

    def _has_token(self, record: dict[str, Any]) -> bool:
        return self._token in str(record.get("token")).split(" ")

    def _take_record(self, record: dict[str, Any]) -> None:
        step, step_time = record.get("step"), _number(record.get("step_time_s"))
        losses = record.get("losses")
        is_timed = step_time is not None and step_time > 0
        if type(step) is not int or not isinstance(losses, dict) or not (is_timed and 0 <= step < _MOST_STEPS):
            self._malformed += 1
            return
        if self._is_restarted:
            self._restarts.append(step)
            self._is_restarted = False
        self._repeated += step in self._records
        loss, is_skipped = _number(losses.get("lm loss")), bool(_number(record.get("skipped_iterations")))
        self._records[step] = StepRecord(
            step=step,
            step_time_s=step_time,
            tflops_per_gpu=_number(record.get("tflops_per_gpu")),
            loss=None if is_skipped and not loss else loss,
            left_out=SKIPPED if is_skipped else "",
            grad_norm=_number(record.get("grad_norm")),
            peak_memory_gib=_number(record.get("peak_memory_gib")),
        )

    def summary(self) -> LogSummary:
        """Return a summary of the lines read so far."""
        fallen = [now.step for before, now in pairwise(self._iterations) if now.step < before.step]
        restarts = self._restarts if self._records else fallen
        notes = [f"the run started again at step {step}" for step in restarts[:_MOST_RESTARTS]]
        if len(restarts) > _MOST_RESTARTS:
            notes.append(f"it started again {len(restarts) - _MOST_RESTARTS} more times")
        if self._malformed:
            notes.append(f"{self._malformed} damaged records were left out")
        if self._foreign:
            notes.append(f"{self._foreign} records that are not of this run's job were left out")
        if self._repeated:
            notes.append(_REPEATED.format(self._repeated))
        if self._records:
            steps = tuple(self._records[step] for step in sorted(self._records))
            return LogSummary(steps, "records", self._run, tuple(notes))
        if not self._times:
            return LogSummary((), "none", self._run, tuple(notes))
        lines, num_lost = numbered(self._times, self._iterations)
        if self._iterations and (len(self._iterations) != len(self._times) or num_lost):
            notes.append(f"{len(self._times)} step-time lines for {len(self._iterations)} iteration lines")
        found: dict[int, StepRecord] = {}
        for step, pair in lines:
            found[step] = _completed(_record_of(step, *pair), found.get(step))
        if len(found) < len(lines):
            notes.append(_REPEATED.format(len(lines) - len(found)))
        return LogSummary(tuple(found[step] for step in sorted(found)), "lines", self._run, tuple(notes))


def _record_of(step: int, time: StepLine | None, iteration: StepLine | None) -> StepRecord:
    """Return a step; the iteration line's time, in tenths of a ms, is finer than the step-time line's."""
    seconds = (time.step_time_s or None) if time else None  # 0: rounded
    rate = time.tflops_per_gpu if time else None
    if iteration is None:
        return StepRecord(step, seconds, rate, None)
    if not rate and iteration.tflops_per_gpu is not None:  # 0: unknown to the launcher
        rate = iteration.tflops_per_gpu
    left_out = SKIPPED if iteration.is_skipped else ""
    times = iteration.step_time_s or seconds, rate
    return StepRecord(step, *times, iteration.loss, iteration.grad_norm, left_out=left_out)


def _completed(step: StepRecord, before: StepRecord | None) -> StepRecord:
    """Return a repeated step, with the rate of its earlier lines if both took equally long.

    Two ranks print the line, or two streams of one job are in the log: only one of the copies has a partner.
    """
    if before is None or step.tflops_per_gpu is not None or not step.step_time_s or not before.step_time_s:
        return step
    is_same = math.isclose(step.step_time_s, before.step_time_s, rel_tol=_SAME)
    return replace(step, tflops_per_gpu=before.tflops_per_gpu) if is_same else step


def _number(value: Any) -> float | None:
    """Return a number; accepts the strings "nan", "inf" and "-inf", which stand for numbers that JSON lacks."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_log(path: Path, token: str | None = None, *, has_records: bool = True) -> LogSummary:
    """Read a whole log, or take what this process read of it before; a missing or unreadable file has no steps.

    token, has_records: as for the parser.
    """
    try:
        found = os.stat(path)
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        has_settled = time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _TICK_NS
        return (_parsed if has_settled else _parsed.__wrapped__)(path, state, token, has_records)
    except FileNotFoundError:
        return LogSummary(notes=(f"{path.name} does not exist",))
    except OSError as error:
        fault = f"{path.name} cannot be read ({error.strerror})"
        return LogSummary(notes=(fault,), fault=fault)


# Clocks of file systems tick: two changes within one tick have the same time
_TICK_NS = 50_000_000


@lru_cache(maxsize=512)
def _parsed(path: Path, state: tuple[int, ...], token: str | None, has_records: bool) -> LogSummary:
    """Parse a log. state: of the file, whose every change alters it."""
    parser = LogParser(token, has_records=has_records)
    with open_regular(path) as log:
        for chunk in read_chunks(log):
            parser.feed(chunk)
    return parser.finish()


_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
# Two expressions: a single expression that spans the text between them takes quadratic time on a long line
_STEP_TIME = re.compile(rf"Step Time\s*:\s*{_NUMBER}\s*s", re.IGNORECASE)
_UTILIZATION = re.compile(rf"GPU utilization:\s*{_NUMBER}\s*(?:MODEL_)?TFLOP/s/GPU", re.IGNORECASE)
_DEEPEST = 20
# Labels of srun --label (padded) and torchrun before a rank's line, and the NULs of a file that was cut while written
_LABELS = r"(?:\x00*(?: {0,5}\d{1,6}: |\[[\w-]{1,40}\]: ?)){0,4}\x00*"
_ITERATION = re.compile(r"\biteration\s+([0-9]{1,15})/\s*([0-9]{1,15})\s*\|(.*)")
# Megatron-Bridge's, before its first step
_LOADED = re.compile(
    r"successfully loaded checkpoint from .{1,4000} \[ t \d+/\d+, p \d+/\d+ \] at iteration (\d{1,15})\b"
)
_PART = re.compile(r"Step Time\s*:|\biteration\s+[0-9]{1,15}/", re.IGNORECASE)
_MARK = re.compile(rf"({STEP_MARK}|{RUN_MARK}) (?={{)")
_MOST_RECORDS = 8  # per line
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_SAME = 0.001  # between two ranks' clocks, for one step


def _may_tell(line: bytes) -> bool:
    """Return whether a line is to be read. Most are not, and looking for bytes is much faster than reading."""
    lower = line.lower()
    return any(word in lower for word in _WORDS)


def match_step_time(line: str) -> tuple[float, float] | None:
    """Return (step time in s, TFLOP/s/GPU) of a "Step Time" line; a prefix such as a rank is allowed."""
    time = _STEP_TIME.search(line)
    rate = _UTILIZATION.search(line, time.end()) if time else None
    return (float(time[1]), float(rate[1])) if time and rate else None


def match_iteration(line: str) -> dict[str, Any] | None:
    """Return the fields of an "iteration N/ M |" line. A NaN or negative loss is not printed there.

    A field without a closing bar may be cut, and is left out.
    """
    match = _ITERATION.search(line)
    if not match:
        return None
    pairs = (part.partition(":") for part in match[3].split("|")[:-1])
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    milliseconds = _number(fields.get("elapsed time per iteration (ms)")) or 0.0
    is_measured = math.isfinite(milliseconds) and milliseconds > 0
    return {
        "step": int(match[1]),
        "train_iters": int(match[2]),
        "step_time_s": round(milliseconds / 1000, 9) if is_measured else None,
        "tflops_per_gpu": _number(fields.get("throughput per GPU (TFLOP/s/GPU)")),
        "loss": _number(fields.get("lm loss", fields.get("loss"))),
        "grad_norm": _number(fields.get("grad norm")),
        "nan_iterations": _number(fields.get("number of nan iterations")) or 0,
        "skipped_iterations": _number(fields.get("number of skipped iterations")) or 0,
    }


def match_record(line: str, mark: str) -> dict[str, Any] | None:
    """Return the JSON object after `mark`, which begins the line except for a rank's label, or None.

    An object that is cut or nested deeper than 20 is not a record.
    """
    if not (start := re.match(rf"{_LABELS}{mark} (?={{)", line)):
        return None
    record, end = _decoded(line, start.end())
    return record if not line[end:].strip() else None


def _decoded(line: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object that begins at `start`, None if it is cut or nested deeper than 20, and its end."""
    try:
        record, end = json.JSONDecoder().raw_decode(line, start)
    except (ValueError, RecursionError):
        return None, start
    may_be_deep = line.count("[", start, end) + line.count("{", start, end) > _DEEPEST
    return (None if may_be_deep and is_deep(record, _DEEPEST) else record), end


def has_record(line: str) -> bool:
    """Return whether a line contains a record, whole or damaged, at any place."""
    return f"{STEP_MARK} {{" in line or f"{RUN_MARK} {{" in line


def extract_mbridge_metrics(text: str) -> tuple[list[float], list[float]]:
    """Return (step times in s, TFLOP/s per GPU) of the last ten records, aligned: CloudAI's reading of a log.

    As the reference on well-formed logs. On others: a number in scientific notation, a sign or a NaN does not
    match; of two records on a line the first counts, and if it is torn after its step time, that time pairs with the
    second record's TFLOP/s; a record cut in half by the end of a line or of the file is lost; bytes that are not UTF-8
    and NUL bytes are skipped over; CRLF ends a line as LF does.
    """
    return _last_pairs(text.splitlines())


def stream_mbridge_metrics(path: Path) -> tuple[list[float], list[float]]:
    """Return the same for a file of any size; memory does not grow with it."""
    return _last_pairs(_lines(path))


def _last_pairs(lines: Iterable[str]) -> tuple[list[float], list[float]]:
    pairs = deque((pair for line in lines if (pair := match_step_time(line)) is not None), maxlen=10)
    return [time for time, _ in pairs], [tflops for _, tflops in pairs]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that may contain a record; searching bytes first is many times faster than decoding them all."""
    rest = b""
    with open_regular(path) as log:
        for chunk in read_chunks(log):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            yield from (line.decode("utf-8", errors="replace") for line in lines if b"TFLOP" in line.upper())
    yield rest.decode("utf-8", errors="replace")
