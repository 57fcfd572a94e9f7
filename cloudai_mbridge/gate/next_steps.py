"""Next steps after a gate that is not green, to paste: page, commits, reproduction, promotion, waiver."""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

from cloudai_mbridge.errors import BadInput, MBridgeError
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.gate.policy import NO_REASON, LoadedPolicy
from cloudai_mbridge.gate.promotion import MAX_NOISE, Terms, propose, select
from cloudai_mbridge.gate.runs import RunResult, read_results
from cloudai_mbridge.gate.verdict import EXIT_CODES, GREEN, GateResult, GateVerdict, PointVerdict
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data

_WAIVED_FOR = timedelta(days=30)
_MOST_NAMES = 8  # more points than that are all points
_ALL = "*"
_TIMES = "step_time*"  # one slowdown, averaged in several ways: one waiver
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True)
class NextSteps:
    """Next steps of the author of a change; "" for a step that does not exist.

    point: the worst point.
    page: the page of its run.
    commits: the command that lists the commits of the benchmark's repository since the reference.
    reproduce: the command that runs the point again.
    accept: the command that makes the results the baseline.
    not_accepted: the reason why no command does.
    waiver: the lines of the policy that excuse the regressions.
    not_waived: the reason why no waiver does.
    policy: the file of the policy.
    """

    point: str
    page: str = ""
    commits: str = ""
    reproduce: str = ""
    accept: str = ""
    not_accepted: str = ""
    waiver: str = ""
    not_waived: str = ""
    policy: str = ""

    def titled(self) -> Iterator[tuple[str, str, str]]:
        """Yield a title, a language and a text per step; a text without a language is for reading."""
        steps = (
            ("page", "", self.page),
            ("commits", "sh", self.commits),
            ("reproduce", "sh", self.reproduce),
            ("accept", "sh", self.accept),
            ("accept", "", self.not_accepted),
            (f"waive: add to {self.policy}", "toml", self.waiver),
            ("waive", "", self.not_waived),
        )
        yield from (step for step in steps if step[-1])


def next_steps(
    result: GateResult, paths: Sequence[Path], loaded: LoadedPolicy, today: date, *, by: str, page: str
) -> NextSteps | None:
    """Return the next steps after a gate; None if it is green.

    The reason of the promotion and the waiver is a placeholder, which both refuse.
    paths: the results.
    by: author of the waiver.
    page: file of the gate's own page, "" for none.
    """
    if not result.exit_code:
        return None
    runs = [run for path in paths for run in read_results(path)]
    point = _worst(result)
    source = next((run.source for run in reversed(runs) if run.point == point), runs[-1].source if runs else None)
    root = None if source is None else Path(source).parent
    own_page = root / ROOT_FILES.report_html if root else None
    if not page and own_page and own_page.is_file():
        page = str(own_page)
    commits = [str(commit) for commit in result.environment_changes.get("benchmark.commit", ())]
    are_known = len(commits) == 2 and all(map(_COMMIT.fullmatch, commits))
    accept, not_accepted = _accept(result, paths, runs, loaded, today)
    waiver, not_waived = _waiver(result, today, by)
    return NextSteps(
        point=point,
        page=page,
        commits=shlex.join(["git", "log", "--oneline", "..".join(commits)]) if are_known else "",
        reproduce=_reproduce(root, point),
        accept=accept,
        not_accepted=not_accepted,
        waiver=waiver,
        not_waived=not_waived,
        policy=str(loaded.path),
    )


def _worst(result: GateResult) -> str:
    """Return the worst point; for a change of all points, the largest change."""
    order = list(EXIT_CODES)
    red = [point for point in result.points if point.verdict not in GREEN] or result.points

    def size(point: PointVerdict) -> float:
        return max((abs(m.change) for m in point.metrics if m.change is not None), default=0.0)

    return min(red, key=lambda point: (order.index(point.verdict), -size(point))).point if red else ""


def _reproduce(root: Path | None, point: str) -> str:
    """Return the command that runs a point again; "" if the run's directory does not contain its options."""
    if root is None:
        return ""
    try:
        options = read_plan_data(root).get("options")
    except (MBridgeError, OSError):
        return ""
    return shlex.join(["mbridge", "run", *options, "--only", point]) if options and point else ""


def _accept(
    result: GateResult, paths: Sequence[Path], runs: Sequence[RunResult], loaded: LoadedPolicy, today: date
) -> tuple[str, str]:
    """Return the command that promotes the results, and the reason if it would be refused."""
    wanted = {GateVerdict.REGRESSION, GateVerdict.NOT_COMPARABLE}
    if result.improvement_fails:
        wanted.add(GateVerdict.IMPROVEMENT)
    verdicts = {point.point: point.verdict for point in result.points}
    are_all = any(point.verdict in wanted for point in result.shared)
    every = list(dict.fromkeys(run.point for run in runs))
    names = [name for name in every if are_all or verdicts.get(name) in wanted]
    if not names:
        return "", ""
    if loaded.baseline_path is None:
        return "", "the reference is a history, to which `mbridge history import` adds results"
    flags = {
        "accept_regression": result.verdict is GateVerdict.REGRESSION,
        "accept_change": any(verdicts.get(name) is GateVerdict.NOT_COMPARABLE for name in names),
    }
    own = names if len(names) < len(every) and len(names) <= _MOST_NAMES else []
    noise = loaded.policy.max_noise or MAX_NOISE
    at, metrics = f"{today}T00:00:00+00:00", loaded.policy.metrics
    terms = Terms("author", at, NO_REASON, max_noise=noise, metrics=metrics, **flags)
    try:
        refusals = propose(loaded.baseline_path, select(runs, own), terms).refusals
    except BadInput as error:
        return "", str(error)
    if refusals:
        point, reasons = next(iter(refusals.items()))
        return "", f"not possible yet: {point}: {reasons[0]}"
    words = [
        *("mbridge", "baseline", "promote"),
        *(f"./{path}" if str(path).startswith("-") else str(path) for path in paths),
        *("--baseline", str(loaded.baseline_path), "--policy", str(loaded.path)),
        *(word for name in own for word in ("--point", name)),
        *(f"--{name.replace('_', '-')}" for name, is_given in flags.items() if is_given),
        *("--reason", NO_REASON),
    ]
    return shlex.join(words), ""


def _waiver(result: GateResult, today: date, by: str) -> tuple[str, str]:
    """Return the waivers of all regressions as TOML, and the reason if they cannot be waived."""
    worse = [
        (row.point, metric.metric, max(map(abs, metric.interval)))
        for row in result.rows
        for metric in row.metrics
        if metric.verdict is GateVerdict.REGRESSION and metric.decides and not metric.waived and metric.interval
    ]
    names = {name for name, _, _ in worse}
    is_shared = any(point.point in names for point in result.shared) or len(names) > _MOST_NAMES
    sizes: dict[tuple[str, str], float] = {}
    measured: dict[str, set[str]] = {}
    worse = [(_ALL if is_shared else name, metric, size) for name, metric, size in worse]
    for name, metric, _ in worse:
        if fnmatchcase(metric, _TIMES):
            measured.setdefault(name, set()).add(metric)
    for name, metric, size in worse:
        is_one_of_several = fnmatchcase(metric, _TIMES) and len(measured[name]) > 1
        key = (name, _TIMES if is_one_of_several else metric)
        sizes[key] = max(size, sizes.get(key, 0.0))
    if any(size > 1 for size in sizes.values()):
        return "", "a change of more than 100 % cannot be waived"
    terms = {"reason": NO_REASON, "until": today + _WAIVED_FOR, "by": by}
    waivers = [
        {"point": name, "metric": metric, "up_to": min(1.0, math.ceil(100 * size) / 100), **terms}
        for (name, metric), size in sizes.items()
    ]
    return render_toml({"waivers": waivers}) if waivers else "", ""
