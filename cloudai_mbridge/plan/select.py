"""Choice of points: by name or coordinate (`--only EXPR`), and by the results of an earlier run (`--failed-of RUN`).

The sweep is expanded and checked first: labels, limits and rules are the same as without a choice.
"""

import difflib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from cloudai_mbridge.errors import BadInput, NothingFailed, counted, shown
from cloudai_mbridge.plan.run_plan import SUCCEEDED_IN, LeftOut

Axes = Mapping[str, Mapping[str, Sequence[Any]]]  # test -> axis -> values
_MOST_NAMES, _MOST_KNOWN = 8, 5000
_MOST_TEXT = 200


@dataclass(frozen=True)
class Selection:
    """The points to run. only: expressions, of which one must match.

    run: an earlier one, of a scenario, whose good points are left out; "" for none. Its points, by test and label, are
    succeeded: those whose runs all did, and others: those that failed, or were not run; with their coordinates.
    """

    only: tuple[str, ...] = ()
    run: str = ""
    scenario: str = ""
    succeeded: frozenset[tuple[str, str]] = frozenset()
    others: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only or self.run)


ALL_POINTS = Selection()


# Of a point's test, label and coordinates: whether it is meant
_Condition = Callable[[str, str, Mapping[str, Any]], bool]


@dataclass
class _Expression:
    """One `--only`: a point must meet all conditions. names: names and patterns of points and tests among them.

    rejected: the name of a match that does not run.
    """

    text: str
    names: Sequence[str]
    conditions: Sequence[_Condition]
    is_matched: bool = False
    rejected: str = ""

    def matches(self, test_id: str, label: str, coordinates: Mapping[str, Any]) -> bool:
        return all(meets(test_id, label, coordinates) for meets in self.conditions)


@dataclass
class PointChoice:
    """A selection among the points of a scenario, to which they are shown one after the other."""

    selection: Selection
    expressions: Sequence[_Expression]
    axes: Axes
    num_chosen: int = 0
    gone: dict[tuple[str, str], None] = field(default_factory=dict)
    known: dict[str, None] = field(default_factory=dict)

    def why_not(
        self,
        test_id: str,
        label: str,
        coordinates: Mapping[str, Any],
        *,
        is_rejected: bool = False,
        is_searched: bool = False,
    ) -> str:
        """Return why a point is left out, "" if it is chosen. BadInput: points of a search are chosen by a past run."""
        matching = [each for each in self.expressions if each.matches(test_id, label, coordinates)]
        if len(self.known) < _MOST_KNOWN:
            self.known |= {label: None, f"{test_id}/{label}": None}
        for each in matching:
            each.is_matched |= not is_rejected
            each.rejected = each.rejected or (f"{test_id}/{label}" if is_rejected else "")
        if self.expressions and not matching:
            return f"does not match {_options(self.selection.only)}"
        if past := self.selection.run:
            if is_searched:
                raise BadInput(
                    f"--failed-of: test {test_id!r} is a search, whose failed and untried points are results; continue"
                    " it with `mbridge resume`, or choose points with --only"
                )
            if (test_id, label) in self.selection.succeeded:
                return f"{SUCCEEDED_IN}{past}"
        if not is_rejected:
            self.num_chosen += 1
            self.gone.pop((test_id, label), None)
        return ""

    def check(self) -> None:
        """Check the choice, after all points.

        BadInput: an expression matches no point that would run, or a failed point of the past run is not among them.
        NothingFailed: no point of the past run is left to run.
        """
        if unmatched := [each for each in self.expressions if not each.is_matched]:
            raise BadInput("\n".join(f"--only {shown(each.text)}: {self._why_no_match(each)}" for each in unmatched))
        past = self.selection.run
        if past and self.gone:
            names = listed([f"{test_id}/{label}" for test_id, label in self.gone])
            raise BadInput(
                f"--failed-of {past}: {names}: failed or did not run there, and this scenario does not run"
                f" {'it' if len(self.gone) == 1 else 'them'} any more; choose the points with --only"
            )
        if past and not self.num_chosen:
            among = f" among {_options(self.selection.only)}" if self.expressions else ""
            raise NothingFailed(
                f"--failed-of {past}: no point failed or is missing there{among}, so there is nothing to run"
            )

    def _why_no_match(self, expression: _Expression) -> str:
        if expression.rejected:
            return f"only points match that do not run, such as {expression.rejected}; see `mbridge sweep explain`"
        known = [*self.axes, *self.known]
        for name in expression.names:
            if not any(fnmatchcase(each, name) or each == name for each in known):
                near = difflib.get_close_matches(name.strip("*?"), known, 3, cutoff=0.4)
                remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"tests: {listed([*self.axes])}"
                return f"no test or point is named {shown(name)}; {remedy}"
        return "no point matches that the scenario would run; `mbridge sweep plan` lists points and limits"


def among(selection: Selection, scenario: str, axes: Axes) -> PointChoice:
    """Return the choice among the points of a scenario, whose tests have these axes.

    BadInput: an expression is malformed, or names no axis or value; the past run is of another scenario.
    """
    if selection.run and selection.scenario != scenario:
        other = f"is a run of scenario {selection.scenario!r}, not of {scenario!r}"
        raise BadInput(f"--failed-of {selection.run}: {other}; give a run of it")
    expressions = []
    for text in selection.only:
        parts = [text.strip()] if _is_name(text.strip(), axes) else [part.strip() for part in text.split(",")]
        if not all(parts):
            what = "is empty" if not text.strip() else "has a condition that is empty"
            raise BadInput(f"--only {shown(text)}: {what}; give names, or conditions such as tp=2,pp=[14]")
        names = [part for part in parts if _is_name(part, axes) or "=" not in part]
        conditions = [_named(part, axes) if part in names else _at_value(part, text, axes) for part in parts]
        expressions.append(_Expression(text, names, conditions))
    gone = {
        name: None
        for name, coordinates in selection.others.items()
        if not expressions or any(each.matches(*name, coordinates) for each in expressions)
    }
    return PointChoice(selection, expressions, axes, gone=gone)


def hooks_of(runs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of tests that run before or after all others, as those of hooks, which always run, do."""
    gates = {str(run["test_id"]) for run in runs if run.get("is_gate")}
    after = {str(run["test_id"]): set(run.get("after_completion", ())) for run in runs if run["test_id"] not in gates}
    last = {
        name for name, tests in after.items() if tests and all(after[each] == tests for each in after.keys() - tests)
    }
    return gates | last


def notes_on_choice(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield a note for each reason, with the names of the points that are left out."""
    by_reason: dict[str, list[str]] = {}
    for each in left_out:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, names in by_reason.items():
        yield f"{counted(len(names), 'point')} left out: {listed(names)}: {reason}"


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _named(text: str, axes: Axes) -> _Condition:
    """Return the condition that a point, or its test, has a name; of a pattern, that it matches."""
    is_exact = _is_name(text, axes)

    def meets(test_id: str, label: str, coordinates: Mapping[str, Any]) -> bool:
        names = (test_id, label, f"{test_id}/{label}")
        return text in names or (not is_exact and any(fnmatchcase(name, text) for name in names))

    return meets


def _at_value(part: str, whole: str, axes: Axes) -> _Condition:
    """Return the condition AXIS=VALUE; of a pattern that is not a value itself, that the value matches.

    BadInput: no test has the axis, or the value.
    """
    name, _, value = (each.strip() for each in part.partition("="))
    values = [each for of_test in axes.values() for each in of_test.get(name, ())]
    where = f"--only {shown(whole)}"
    if not values:
        names = sorted({name for of_test in axes.values() for name in of_test})
        near = difflib.get_close_matches(name, names, 3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise BadInput(f"{where}: {shown(name)} is not an axis; {hint}axes: {', '.join(names) or 'none'}")
    is_exact = any(_equals(value, each) for each in values)
    if not is_exact and not any(_is_like(value, each) for each in values):
        known = listed([_text(each) for each in {_text(each): each for each in values}.values()])
        raise BadInput(f"{where}: {shown(value)} is not a value of {name}; its values: {known}")

    def meets(test_id: str, label: str, coordinates: Mapping[str, Any]) -> bool:
        if name not in coordinates:
            return False
        return _equals(value, coordinates[name]) or (not is_exact and _is_like(value, coordinates[name]))

    return meets


def _is_name(text: str, axes: Axes) -> bool:
    """Return whether a text is a test's id, or begins with one and can end with a label: ids may hold commas or [."""
    labels = [text.removeprefix(f"{test_id}/") for test_id in axes if text.startswith(f"{test_id}/")]
    return text in axes or any(not set(",=*?[") & set(label) for label in labels)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _equals(text: str, value: Any) -> bool:
    """Return whether a text is a value, in Python's or in TOML's spelling; numbers compare as numbers."""
    if text in (str(value), _text(value)):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    for kind in (int, float):
        try:
            return bool(kind(text) == value)
        except ValueError:
            continue
    return False


def _is_like(pattern: str, value: Any) -> bool:
    return fnmatchcase(str(value), pattern) or fnmatchcase(_text(value), pattern)


def _options(only: Sequence[str]) -> str:
    text = " ".join(f"--only {shlex.quote(each)}" for each in only)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
