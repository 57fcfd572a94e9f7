"""Stored points and runs of a history, and parsing of its texts and numbers."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cloudai_mbridge.errors import shown
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.gate.compare.reference import Values
from cloudai_mbridge.gate.results.values import is_value_of

_MOST_SHOWN = 40


@dataclass(frozen=True)
class StoredPoint:
    """The runs of one point under one comparability key. last_value: the last good run's step time, if it has one."""

    point: str
    comparability_id: str
    num_good: int
    num_failed: int
    last_ended_at: str
    last_value: Any


@dataclass(frozen=True)
class StoredRun:
    """A run of the history. values: by metric. ended_at: UTC. commit: of its checkout, None if unknown."""

    run_id: str
    point: str
    scenario: str
    system: str
    comparability_id: str
    verdict: Literal["success", "failed"]
    reasons: tuple[str, ...]
    ended_at: str
    nodes: tuple[str, ...]
    commit: str | None
    warmup_steps: int
    num_steps: int | None
    flops_formula: str | None
    flops_per_step: float | None
    environment: Mapping[str, Any]
    values: Mapping[str, Values]


def read_texts(stored: str) -> tuple[str, ...]:
    """Parse a list of texts; ValueError: not a list of texts."""
    found = _parse(stored)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a list of texts")
    return tuple(found)


def read_table(stored: str) -> Mapping[str, Any]:
    """Parse a table; ValueError: not a table."""
    found = _parse(stored)
    if not isinstance(found, dict):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a table")
    return found


def read_values(name: str, stored: Any) -> Values:
    """Parse the numbers of a metric; ValueError: invalid for the metric."""
    found = _parse(stored) if isinstance(stored, str) else [stored]
    values = tuple(found) if isinstance(found, list) else ()
    if not all(isinstance(value, float) for value in values) or not is_value_of(name, values):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a {name}")
    return values


def _parse(stored: str) -> Any:
    """Parse JSON; None if invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return parse_json(stored.encode())
    return None
