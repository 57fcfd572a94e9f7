"""Notify about a run that has ended. Nothing here raises, waits long, or changes the exit code."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.completion.body import body_of
from cloudai_mbridge.completion.command import Command
from cloudai_mbridge.completion.webhook import Webhook
from cloudai_mbridge.errors import InUse, shortened
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.report.model import RunReport
from cloudai_mbridge.runner.interrupt import Detached, Interrupted, Interrupts

LONGEST_S = 30.0
_SLICE_S = 0.05


@dataclass
class Ended:
    """How a run has ended. report: None until one is written."""

    report: RunReport | None = None


@contextlib.contextmanager
def completion(plan: ScenarioPlan, root: Path, note: Callable[[str], None]) -> Iterator[Ended]:
    """Notify when the enclosed block ends, also if it fails. A run that another process holds, or that was
    left to its scheduler, has not ended.

    note: receives a line about each failed notification.
    """
    ended = Ended()
    try:
        yield ended
    except (InUse, Detached):
        raise
    except Exception as error:
        _tell(plan, root, ended.report, error, note)
        raise
    _tell(plan, root, ended.report, None, note)


def _tell(
    plan: ScenarioPlan, root: Path, report: RunReport | None, error: Exception | None, note: Callable[[str], None]
) -> None:
    if (asked := plan.runner.on_completion) is None:
        return
    try:
        body = json.dumps(body_of(plan.scenario, plan.system, root.absolute(), report, error), allow_nan=False).encode()
        for problem in _problems(lambda: [*Command.of(asked, root.absolute(), body), *Webhook.of(asked, body)]):
            note(shortened(f"note: on_completion: {problem}"))
    except Exception as defect:  # a failed notification must not change the run's result
        with contextlib.suppress(Exception):
            note(f"note: on_completion: {type(defect).__name__}")


def _problems(start: Callable[[], list[Command | Webhook]]) -> list[str]:
    """Wait until all have ended, but not longer than `LONGEST_S` nor past a signal; return the problems."""
    end, why = time.monotonic() + LONGEST_S, f"has not ended in {LONGEST_S:g} s"
    with Interrupts() as interrupts:
        started = start()
        try:
            while any(each.is_open for each in started) and time.monotonic() < end:
                interrupts.check()
                time.sleep(_SLICE_S)
        except Interrupted:
            why = "was stopped by a signal"
    return [problem for each in started if (problem := each.end(why))]
