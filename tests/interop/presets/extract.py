"""Write the presets of clones of Megatron-Bridge as data files, as in `cloudai_mbridge/megatron_bridge/data/presets`.

    python -m tests.interop.presets.extract DIRECTORY VERSION=CLONE...

The clones are read, not run. Each gives DIRECTORY/<version>.csv. The version is named because that in a clone's
package_info.py is not always its tag's: v0.6.0 says 0.6.1.
"""

import csv
import io
import sys
from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.preset_rows import FIELDS, KEY, UNKNOWN, PresetCatalog
from tests.interop.presets.reader import read_source


def main(arguments: list[str]) -> int:
    """Extract every clone that is named."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for argument in arguments[1:]:
        version, _, clone = argument.partition("=")
        if (source := read_source(Path(clone))) is None:
            print(f"{Path(clone)}: not a clone of Megatron-Bridge with performance presets", file=sys.stderr)
            return 2
        path = Path(arguments[0], f"{version}.csv")
        path.write_text(as_text(source, tuple(FIELDS)), encoding="utf-8")
        print(path)
    return 0


def as_text(source: PresetCatalog, fields: tuple[str, ...]) -> str:
    """Write a data file."""
    lines = [f"# {name} = {_cell(getattr(source, name))}" for name in ("is_flat", "default_variant")]
    for recipe, layouts in source.layouts.items():
        lines += [f"# layout {recipe} pp={pp} vp={vp} = {_cell(layout)}" for (pp, vp), layout in layouts.items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*KEY, *fields])
    for row in source.rows:
        known = [_cell(row.values[name]) if name in row.values else UNKNOWN for name in fields]
        writer.writerow([*(_cell(getattr(row, name)) for name in KEY), *known])
    return "\n".join(lines) + "\n" + out.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{' '.join(value)}]" if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
