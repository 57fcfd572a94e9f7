"""Documentation of the rules, from their docstrings and from the releases that lifted them."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import PlainSerializer

from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.rehearsed import r01_every_rank_of_the_point_is_built
from cloudai_mbridge.constraints.rule import Rule
from cloudai_mbridge.constraints.upstream import LIFTS, Lift, rule_id
from cloudai_mbridge.files.documents import fill, json_object

_PART = re.compile(r"(?:^|\s)(Pass|Fail|Not evaluated|Source): ")
_SETS = {
    "C": "CloudAI's check; for the upstream launcher also with the values that it fills in",
    "M": "Megatron-Core's own check; for both launchers",
    "E": "limit of the embedded loop",
    "R": "rehearsal: only with `--rehearse`",
}
_ALL: tuple[Rule, ...] = (*RULES, r01_every_rank_of_the_point_is_built)


_LIFTED_IN = json_object(
    "LiftedIn",
    "The release of Megatron-Bridge since which a rule does not hold for some points, and why.",
    since=str,
    reason=str,
)
# As it is printed
LiftedIn = Annotated[Lift, PlainSerializer(partial(fill, _LIFTED_IN), return_type=_LIFTED_IN)]


@dataclass(frozen=True)
class RuleDoc:
    """A rule for its reader.

    title: what must hold. reason: "" if the title is sufficient. passes, fails: example arguments.
    not_evaluated: missing input that leaves the rule without a verdict; "" if none. source: where the check comes from.
    lifted: releases that no longer have the rule for some points; empty: it holds for every release.
    """

    rule_id: str
    title: str
    checked_for: str
    reason: str
    passes: str
    fails: str
    not_evaluated: str
    source: str
    lifted: tuple[LiftedIn, ...]


def document(rule: Rule) -> RuleDoc:
    """Return the documentation of a rule."""
    title, _, body = (inspect.getdoc(rule) or "").partition("\n")
    reason, *parts = _PART.split(body)
    texts = {name: _one_line(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    name = rule_id(rule)
    return RuleDoc(
        rule_id=name,
        title=title,
        checked_for=_SETS[name[0]],
        reason=_one_line(reason),
        passes=texts["Pass"].rstrip("."),
        fails=texts["Fail"].rstrip("."),
        not_evaluated=texts.get("Not evaluated", ""),
        source=texts["Source"],
        lifted=LIFTS.get(name, ()),
    )


def documents() -> dict[str, RuleDoc]:
    """Return the documentation of every rule by its id."""
    return {found.rule_id: found for found in map(document, _ALL)}


def details_hint(rule_ids: Iterable[str]) -> str:
    """Return where the details of broken rules are, "" if none is a rule: a limit on memory is the user's own."""
    known = {rule_id(rule) for rule in _ALL}
    names = sorted(known & set(rule_ids))
    return f"details: mbridge rule {' '.join(names)}" if names else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
