"""Say why a run failed: the catalogue's name for it, in front of what was observed, with the lines that show it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.logs import LogSummary
from cloudai_mbridge.logs.tail import last_lines, printable
from cloudai_mbridge.schedulers.interface import JobStatus
from cloudai_mbridge.training.credentials import redacted
from cloudai_mbridge.verdict.judge import RunOutcome
from cloudai_mbridge.verdict.triage import Failure, load_catalogue, triage

HUNG = "HUNG"
_NAN = "nan_loss"
_TAIL = 5
_STACK_FILES = 4
_STACK_LINES = 12


def explain(
    outcome: RunOutcome, status: JobStatus | None, log: LogSummary, paths: Sequence[Path], stacks: Path
) -> RunOutcome:
    """Return the outcome of a failed run with what is known to make runs fail so.

    paths: its logs. stacks: the directory in which its ranks have left their stacks, if they hung.
    """
    failure = triage(status, paths) or _bad_loss(log)
    if failure is None:
        return outcome
    if status is not None and status.state == HUNG:
        failure = replace(failure, evidence=(*_stacks(stacks), *failure.evidence))
    reasons = (f"{failure.title} ({failure.id}); {failure.remedy}", *outcome.reasons)
    tail = [line for path in reversed(paths) for line in last_lines(path, _TAIL)] if failure.evidence else []
    return replace(outcome, reasons=reasons, evidence=(*failure.evidence, *tail) or outcome.evidence, failure=failure)


def _bad_loss(log: LogSummary) -> Failure | None:
    """Name a loss that is not finite, which the log's records may tell without a line that says so."""
    bad = [step for step in log.steps if step.loss is not None and not math.isfinite(step.loss)]
    entry = next((entry for entry in load_catalogue() if entry.id == _NAN), None)
    if not bad or entry is None:
        return None
    evidence = tuple(f"step {step.step}: loss {step.loss}" for step in bad[:3])
    return Failure(entry.id, entry.kind, entry.title, entry.remedy, evidence)


def _stacks(directory: Path) -> Iterator[str]:
    """Yield the beginnings of the last stacks of a few ranks. A slow start has left some before, perhaps."""
    for path in islice(sorted(directory.glob("*.txt")), _STACK_FILES):
        try:
            text = read_regular(path).decode(errors="replace")
        except OSError:
            continue
        last = text[max(text.rfind("Timeout ("), 0) :]
        for line in last.splitlines()[:_STACK_LINES]:
            yield f"{directory.name}/{path.name}: {redacted(printable(line))}"
