"""What differs between two containers as YAML: one of Megatron-Bridge, one of ours."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from cloudai_mbridge.models.pipeline_layout import parse_layout

# field -> (upstream's value, ours) -> in how many containers
Found = dict[str, Counter[tuple[str, str]]]

ABSENT = "absent"
# They act through the fields that they set in other sections, which are compared
_THROUGH_OTHERS = ("mixed_precision", "comm_overlap")
# Of the process or the place, not of the run
_LOCAL = ("dist.local_rank", "logger.save_config_filepath", "checkpoint.load", "checkpoint.save")
# One field under two names
_OTHER_NAME = {"dataset.sequence_length": "dataset.seq_length"}
_LAYOUT = "model.pipeline_model_parallel_layout"
_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def read(text: str) -> dict[str, Any]:
    """Return a container's fields, SECTION.FIELD -> value; classes, functions, dtypes and enums by their last name."""
    return dict(_flat(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))))


def _flat(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in data.items():
        if section == "_target_" or section in _THROUGH_OTHERS:
            continue
        if not isinstance(value, dict):
            yield section, value
            continue
        for field, item in value.items():
            path = _OTHER_NAME.get(f"{section}.{field}", f"{section}.{field}")
            if path not in _LOCAL and field != "_target_":
                yield path, _stages(item) if path == _LAYOUT else _plain(item) if section != "env_vars" else str(item)


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        name = value["_target_"].rpartition(".")[2]
        if name == "tuple":
            return _plain(value["_args_"][0])
        others = {key: _plain(item) for key, item in value.items() if key not in ("_target_", "_call_", "_args_")}
        return value.get("_name_") or ({name: others} if others else name)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _stages(layout: str | list[list[str]] | None) -> str | None:
    """Return a layout, Megatron's short form or a list, with a symbol for each layer."""
    if layout is None:
        return None
    if isinstance(layout, str):
        return "|".join(parse_layout(layout))
    return "|".join("".join(_SYMBOLS[layer] for layer in stage) for stage in layout)


def differences(theirs: Mapping[str, Any], unset: list[str], ours: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return field -> (upstream's value, ours) as text.

    None, False, 0 and what is empty are the same; so is a field that only one side has and that is not set.

    unset: upstream's fields that have their classes' own values.
    """
    found = {}
    for path in sorted({*theirs, *ours}):
        if path not in ours and path in unset:
            continue
        values = theirs.get(path), ours.get(path)
        if values[0] != values[1] and any(values):
            found[path] = (_text(theirs.get(path, ABSENT)), _text(ours.get(path, ABSENT)))
    return found


def _text(value: Any) -> str:
    text = value if value == ABSENT else json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else f"{text[:37]}..."


class Reasons:
    """Why fields differ: a file of patterns, of which the first that fits counts."""

    def __init__(self, path: Path) -> None:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["reason"]
        self._rows = [(pattern, entry["why"]) for entry in entries for pattern in entry["fields"]]

    def of(self, field: str) -> str | None:
        """Return why a field differs, None where there is no reason."""
        return next((why for pattern, why in self._rows if fnmatch(field, pattern)), None)

    def check(self, found: Found) -> None:
        """Every difference has a reason, and every pattern a difference."""
        without = sorted(field for field in found if self.of(field) is None)
        used = {next(p for p, _ in self._rows if fnmatch(field, p)) for field in found if field not in without}
        unused = sorted(pattern for pattern, _ in self._rows if pattern not in used)
        assert not without, f"no reason: {', '.join(without)}"
        assert not unused, f"no difference: {', '.join(unused)}"

    def tables(self, found: Found) -> Iterator[str]:
        """Yield a line for each reason, then its table."""
        for why in dict.fromkeys(why for _, why in self._rows):
            rows = [
                [f"`{field}`", _values(found[field], 0), _values(found[field], 1), str(found[field].total())]
                for field in sorted(found)
                if self.of(field) == why
            ]
            yield f"{why[0].upper()}{why[1:]}:\n"
            yield table(["Field", "Upstream", "Ours", "Containers"], rows)


def _values(counts: Counter[tuple[str, str]], side: int) -> str:
    values = list(dict.fromkeys(pair[side] for pair, _ in counts.most_common()))
    shown = [f"`{value}`".replace("|", "\\|") for value in values[:3]]
    return ", ".join(shown) + (", ..." if len(values) > 3 else "")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)
