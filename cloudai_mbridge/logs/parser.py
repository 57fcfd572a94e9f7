"""Read a training log as a stream: memory grows with the number of steps, not with the size of the log."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from cloudai_mbridge.logs.formats import (
    has_record,
    match_iteration,
    match_run_record,
    match_step_record,
    match_step_time,
)

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 20
_MOST_STEPS = 10**15
_MOST_RESTARTS = 10
_REPEATED = "{} steps were logged more than once; the last of each counts"


@dataclass(frozen=True)
class StepRecord:
    """One step as the log tells it; None where it does not say. peak_memory_gib: the largest rank's, so far."""

    step: int
    step_time_s: float | None
    tflops_per_gpu: float | None
    loss: float | None
    grad_norm: float | None = None
    peak_memory_gib: float | None = None


@dataclass(frozen=True)
class LogSummary:
    """All steps of a log in order.

    source: "records" if our full-precision records were found, "lines" for Megatron-Bridge's two rounded lines, "none".
    run: what the run said of itself at its start. notes: what was odd about the log.
    """

    steps: tuple[StepRecord, ...] = ()
    source: str = "none"
    run: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class LogParser:
    """Feed it bytes as they come; ask for a summary at any time."""

    def __init__(self) -> None:
        self._rest = b""
        self._records: dict[int, StepRecord] = {}
        self._times: list[tuple[float, float]] = []
        self._iterations: list[dict[str, Any]] = []
        self._run: dict[str, Any] = {}
        self._malformed = self._repeated = 0
        self._restarts: list[int] = []
        self._is_restarted = False

    def feed(self, data: bytes) -> None:
        """Take more of the log; an unfinished last line waits for its end."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode("utf-8", errors="replace"))
        self._rest = rest[:_LONGEST_LINE]

    @property
    def num_steps(self) -> int:
        """How many step lines were read so far, repeated ones included."""
        return len(self._records) + self._repeated + len(self._times)

    @property
    def last_step(self) -> int:
        """The highest step so far, 0 before the first."""
        return max(self._records, default=len(self._times))

    def finish(self) -> LogSummary:
        """Take the last line even without a line break, and summarize."""
        self.feed(b"\n")
        return self.summary()

    def _take(self, line: str) -> None:
        if has_record(line):
            if (record := match_step_record(line)) is not None:
                self._take_record(record)
            elif (run := match_run_record(line)) is not None:
                self._take_run(run)
            else:
                self._malformed += 1
        elif (pair := match_step_time(line)) is not None:
            self._times.append(pair)
        elif (iteration := match_iteration(line)) is not None:
            self._iterations.append(iteration)

    def _take_run(self, run: dict[str, Any]) -> None:
        """Take what a run says when it begins. What has no version is not ours, whoever printed it."""
        if "version" in run:
            self._run = run
            self._is_restarted = bool(self._records)

    def _take_record(self, record: dict[str, Any]) -> None:
        step, step_time = record.get("step"), _number(record.get("step_time_s"))
        losses = record.get("losses")
        if not _is_step(step) or step_time is None or not step_time > 0 or not isinstance(losses, dict):
            self._malformed += 1
            return
        if self._is_restarted:
            self._restarts.append(step)
            self._is_restarted = False
        self._repeated += step in self._records
        self._records[step] = StepRecord(
            step=step,
            step_time_s=step_time,
            tflops_per_gpu=_number(record.get("tflops_per_gpu")),
            loss=_number(losses.get("lm loss")),
            grad_norm=_number(record.get("grad_norm")),
            peak_memory_gib=_number(record.get("peak_memory_gib")),
        )

    def summary(self) -> LogSummary:
        """Return what was read so far."""
        notes = []
        notes += [f"the run started again at step {step}" for step in self._restarts[:_MOST_RESTARTS]]
        if len(self._restarts) > _MOST_RESTARTS:
            notes.append(f"it started again {len(self._restarts) - _MOST_RESTARTS} more times")
        if self._malformed:
            notes.append(f"{self._malformed} damaged records were left out")
        if self._repeated:
            notes.append(_REPEATED.format(self._repeated))
        if self._records:
            steps = tuple(self._records[step] for step in sorted(self._records))
            return LogSummary(steps, "records", self._run, tuple(notes))
        if not self._times:
            return LogSummary((), "none", self._run, tuple(notes))
        if self._iterations and len(self._iterations) != len(self._times):
            notes.append(f"{len(self._times)} step-time lines for {len(self._iterations)} iteration lines")
        paired = list(self._paired())
        last = {record.step: record for record in paired}
        if len(last) < len(paired):
            notes.append(_REPEATED.format(len(paired) - len(last)))
        return LogSummary(tuple(last[step] for step in sorted(last)), "lines", self._run, tuple(notes))

    def _paired(self) -> Iterator[StepRecord]:
        """Join the k-th step-time line with the k-th iteration line: two ranks print them, in either order."""
        for i, (step_time, tflops) in enumerate(self._times):
            iteration = self._iterations[i] if i < len(self._iterations) else {}
            is_nan = bool(iteration.get("nan_iterations"))
            loss = math.nan if is_nan else iteration.get("loss")
            yield StepRecord(iteration.get("step", i + 1), step_time, tflops, loss, iteration.get("grad_norm"))


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_STEPS


def _number(value: Any) -> float | None:
    """Return a number; the strings "nan", "inf" and "-inf" stand for what JSON cannot say."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_log(path: Path) -> LogSummary:
    """Read a whole log; one that does not exist, or cannot be read, has no steps."""
    parser = LogParser()
    try:
        with path.open("rb") as log:
            while chunk := log.read(_CHUNK):
                parser.feed(chunk)
    except FileNotFoundError:
        return LogSummary(notes=(f"{path.name} does not exist",))
    except OSError as error:
        return LogSummary(notes=(f"{path.name} cannot be read ({error.strerror})",))
    return parser.finish()
