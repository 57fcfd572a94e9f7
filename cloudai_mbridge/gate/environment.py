"""Environment of a baseline's point: the facts that its runs share, without anything else that a report may hold."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FACTS = ("device", "driver", "cuda", "nccl", "python")
# Tables with their names; none for arbitrary names
_TABLES: Mapping[str, tuple[str, ...]] = {
    **{"git": ("commit", "dirty"), "benchmark": ("commit", "dirty"), "image": ("name", "digest")},
    **{"packages": (), "variables": ()},
}
_LONGEST = 1000  # characters
_SEVERAL = "(several values)"
_LOGIN = re.compile(r"[^/@\s]*:[^/@\s]*@(?!sha256:)|(?<=//)[^/@\s]*@")


def summarize_environments(environments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts that all environments share, and a note on the facts that differ. At least one is required."""
    facts = [_facts(environment) for environment in environments]
    common: dict[str, Any] = {}
    differing = []
    for path in dict.fromkeys(path for fact in facts for path in fact):
        if all(fact.get(path) == facts[0].get(path) for fact in facts):
            table = common if len(path) == 1 else common.setdefault(path[0], {})
            table[path[-1]] = facts[0][path]
        else:
            differing.append(".".join(path))
    if all(isinstance(environment.get("variables"), Mapping) for environment in environments):
        several = {path[1]: _SEVERAL for fact in facts for path in fact if path[0] == "variables"}
        common["variables"] = several | common.get("variables", {})
    notes = [f"the runs differ in {', '.join(differing)}, which is left out of the environment"] if differing else []
    return common, notes


def _facts(environment: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the allowed facts by path; anything else in a report is dropped."""
    found: dict[tuple[str, ...], Any] = {(name,): environment.get(name) for name in _FACTS}
    for table, names in _TABLES.items():
        named = _mapping(environment.get(table))
        found |= {(table, str(name)): named.get(name) for name in names or sorted(named, key=str)}
    found = {path: _clean(value) for path, value in found.items() if _is_fact(value)}
    repositories = environment.get("repositories")
    if isinstance(repositories, list) and repositories:
        found[("repositories",)] = [
            {name: _clean(item[name]) for name in ("url", "commit") if _is_fact(item.get(name))}
            for item in map(_mapping, repositories)
        ]
    return found


def _is_fact(value: Any) -> bool:
    """Return whether a value is a number or a short text; searching a long text for logins could take very long."""
    return len(value) <= _LONGEST if isinstance(value, str) else isinstance(value, int | float)


def _clean(value: Any) -> Any:
    """Remove user and password from an address."""
    return _LOGIN.sub("", value) if isinstance(value, str) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
