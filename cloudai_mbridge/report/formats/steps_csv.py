"""steps.csv: every step of every run.

A number that is missing is an empty cell; one that is not finite is nan, inf or -inf. A text that begins like a formula
(with =, +, -, @ or a tab) gets an apostrophe in front, since spreadsheets run formulas of files that they open: take it
off again before comparing names with those of report.json. Numbers never get one. Control characters but tabs and line
feeds are spelt out, such as \\x0d; so a carriage return begins no formula either.
"""

import csv
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.report.formats.step_rows import COLUMNS, step_rows
from cloudai_mbridge.report.formats.visible import visible
from cloudai_mbridge.report.model import PointReport

_FORMULA = ("=", "+", "-", "@", "\t")


def write_steps_csv(points: Iterable[PointReport], path: Path) -> None:
    """Write the rows one by one: memory does not grow with their number."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows(map(_cells, step_rows(points)))


def _cells(row: tuple[Any, ...]) -> list[Any]:
    return [_cell(value) for value in row]


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return spreadsheet_text(value) if isinstance(value, str) else value


@lru_cache(maxsize=16)  # a run's names are the same in all its rows
def spreadsheet_text(text: str) -> str:
    """Return a text as a cell that no spreadsheet takes for a formula."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
