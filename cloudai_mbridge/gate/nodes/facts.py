"""Facts about the nodes of several runs, logged at the start of training, and nodes that differ."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.gate.results.read import RunResult

_MOST_NODES = 100_000


@dataclass(frozen=True)
class OddFact:
    """A fact in which a node differs from most others. usual: value of `others` of the nodes with this fact."""

    node: str
    fact: str
    value: str
    usual: str
    others: int


def odd_facts(results: Iterable[RunResult]) -> list[OddFact]:
    """Return the facts in which nodes differ from more than half of all nodes; of two nodes, neither is an outlier."""
    told: dict[str, dict[str, str]] = {}
    for run in results:
        for node, facts in _facts_of(run.hosts).items():
            if node in told or len(told) < _MOST_NODES:
                told.setdefault(node, {}).update(facts)
    found = []
    for fact in sorted({name for facts in told.values() for name in facts}):
        values = {node: facts[fact] for node, facts in told.items() if fact in facts}
        usual, count = Counter(values.values()).most_common(1)[0]
        if count > len(values) / 2:
            found += [
                OddFact(node, fact, value, usual, count) for node, value in sorted(values.items()) if value != usual
            ]
    return found


def _facts_of(hosts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the facts of each node of a run. They come from a log; entries of another form are skipped."""
    names, facts, odd = hosts.get("names"), hosts.get("facts"), hosts.get("odd")
    if not isinstance(names, list) or not isinstance(facts, dict):
        return {}
    differing = odd if isinstance(odd, dict) else {}
    found = {}
    for name in names:
        if isinstance(name, str) and name:
            own = differing.get(name)
            both = {**facts, **(own if isinstance(own, dict) else {})}
            found[name] = {str(fact): _text(value) for fact, value in both.items() if value is not None}
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
