"""What a baseline says of where its runs ran: the known facts of their reports, as far as all runs agree."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FACTS = ("device", "driver", "cuda", "nccl", "python")
_TABLES: Mapping[str, tuple[str, ...]] = {"git": ("commit", "dirty"), "image": ("name", "digest")}
_REPOSITORY = ("url", "commit")
_LOGIN = re.compile(r"[^/@\s]*:[^/@\s]*@(?!sha256:)|(?<=//)[^/@\s]*@")


def summarize_environments(environments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts on which all agree, and a note on those that differ. There must be one."""
    facts = [_facts(environment) for environment in environments]
    names = dict.fromkeys(name for fact in facts for name in fact)
    common = {name: facts[0][name] for name in names if all(fact.get(name) == facts[0].get(name) for fact in facts)}
    differing = [".".join(name) for name in names if name not in common]
    notes = [f"the runs differ in {', '.join(differing)}, which is left out of the environment"] if differing else []
    return _nested(common), notes


def _facts(environment: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return what is known and may be kept, by its path; anything else in a report stays there."""
    packages = _mapping(environment.get("packages"))
    found: dict[tuple[str, ...], Any] = {(name,): environment.get(name) for name in _FACTS}
    for table, names in _TABLES.items():
        found |= {(table, name): _mapping(environment.get(table)).get(name) for name in names}
    found |= {("packages", str(name)): packages[name] for name in sorted(packages, key=str)}
    found = {path: _clean(value) for path, value in found.items() if isinstance(value, str | int | float)}
    repositories = environment.get("repositories")
    if isinstance(repositories, list) and repositories:
        found[("repositories",)] = [_repository(item) for item in repositories]
    return found


def _repository(item: Any) -> dict[str, Any]:
    facts = _mapping(item)
    return {name: _clean(facts[name]) for name in _REPOSITORY if isinstance(facts.get(name), str)}


def _clean(value: Any) -> Any:
    """Take a user and password out of an address."""
    return _LOGIN.sub("", value) if isinstance(value, str) else value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _nested(facts: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in facts.items():
        table = nested if len(path) == 1 else nested.setdefault(path[0], {})
        table[path[-1]] = value
    return nested
