"""report.json: a line per point, so that a large one is written fast, and read by eye and by `grep`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write `Report.to_dict()`."""
    head = json.dumps({name: value for name, value in report.items() if name != "points"}, indent=1, allow_nan=False)
    points = report["points"]
    with replacing(path) as unfinished, unfinished.open("w", encoding="ascii", newline="\n") as file:
        file.write(head.removesuffix("\n}") + ',\n "points": [')
        for number, point in enumerate(points):
            file.write(("," if number else "") + "\n  " + json.dumps(point, allow_nan=False))
        file.write("\n ]\n}\n" if points else "]\n}\n")
