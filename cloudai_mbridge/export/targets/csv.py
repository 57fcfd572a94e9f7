"""CSV: a row per run. Missing values are empty cells; texts are safe in spreadsheets."""

import csv
import io
import json
from datetime import datetime
from typing import Any

from cloudai_mbridge.export.table import RunTable
from cloudai_mbridge.report.rows import spreadsheet_text


def render(table: RunTable) -> bytes:
    """Return the table with a header row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_text, table.columns))
    writer.writerows([_cell(value) for value in row.values()] for row in table.rows)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return spreadsheet_text(value) if isinstance(value, str) else json.dumps(value)
