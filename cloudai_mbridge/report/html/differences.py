"""What is the same in all runs of a report, and what differs between them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_VALUES = 12
MOST_RUNS = 4


def differences(runs: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Split the fields of the runs, given with their indices, into common and differing ones.

    Returns "common": {name: text}, and "differing": {name: {"num_values": n, "values": [...]}} with at most MOST_VALUES
    values, the most frequent first, each {"text", "count", "runs": the first few indices}. The text is null where
    a run does not say.
    """
    flat = [(index, dict(flatten(fields))) for index, fields in runs]
    names = dict.fromkeys(name for _, fields in flat for name in fields)
    common, differing = {}, {}
    for name in names:
        owners: dict[str | None, list[int]] = defaultdict(list)
        for index, fields in flat:
            owners[fields.get(name)].append(index)
        if len(owners) == 1:
            common[name] = next(iter(owners))
        else:
            differing[name] = _values(owners)
    return {"common": common, "differing": differing}


def _values(owners: Mapping[str | None, list[int]]) -> dict[str, Any]:
    counts = Counter({text: len(indices) for text, indices in owners.items()})
    values = [
        {"text": text, "count": count, "runs": owners[text][:MOST_RUNS]}
        for text, count in counts.most_common(MOST_VALUES)
    ]
    return {"num_values": len(owners), "values": values}


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield dotted names and texts; lists of scalars become one text, lists of tables are numbered."""
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from flatten({str(number): item for number, item in enumerate(value, 1)}, f"{name}.")
        else:
            yield name, _text(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return json.dumps(value)
