"""Write the presets of clones of Megatron-Bridge as data files: what `data/presets` ships.

    python -m cloudai_mbridge.megatron_bridge.presets.extract DIRECTORY VERSION=CLONE...

The clones are read, not run. Each gives DIRECTORY/<version>.csv. The version is named because that in a clone's
package_info.py is not always its tag's: v0.6.0 says 0.6.1.
"""

import sys
from pathlib import Path

from cloudai_mbridge.megatron_bridge.presets.reader import read_source
from cloudai_mbridge.megatron_bridge.presets.rows import FIELDS, as_text


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
