"""Outcomes of parts, and the run of all parts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed, PartSkipped


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Part:
    """A check. run: takes the kit, returns figures. budget_s: its processes are ended then."""

    name: str
    description: str
    budget_s: float
    run: Callable[[Kit], Figures]
    needs: tuple[Callable[[Kit], None], ...] = ()  # each raises PartSkipped


@dataclass(frozen=True)
class Outcome:
    """How a part ended. reason: empty if it passed."""

    name: str
    status: Status
    reason: str = ""
    duration_s: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


def run_parts(parts: Sequence[Part], kit: Kit, end: float, patience: float = 1.0) -> Iterator[Outcome]:
    """Run the parts in order and yield each outcome.

    end: on the monotonic clock; no part starts after it, and all commands are ended at it. patience: factor on the
    budgets, for a machine that is slow or busy.
    """
    for part in parts:
        start = time.monotonic()
        if start >= end:
            yield Outcome(part.name, Status.SKIPPED, "the time of all parts is used up")
            continue
        kit.deadline = min(start + part.budget_s * patience, end)
        status, reason, figures = _run(part, kit)
        yield Outcome(part.name, status, reason, time.monotonic() - start, figures)


def _run(part: Part, kit: Kit) -> tuple[Status, str, Figures]:
    try:
        for need in part.needs:
            need(kit)
        return Status.PASSED, "", part.run(kit)
    except PartSkipped as error:
        return Status.SKIPPED, _one_line(error), {}
    except PartFailed as error:
        return Status.FAILED, _one_line(error), error.figures
    except Exception as error:  # a defect of one part must not stop the others
        return Status.FAILED, f"{type(error).__name__}: {_one_line(error)}", {}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000]
