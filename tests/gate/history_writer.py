"""Import reports one after another and say of each, on a line, that it is in. No tests: to be killed by one."""

import sys
from pathlib import Path

from cloudai_mbridge.gate.history import History


def main(history: str, reports: list[str]) -> None:
    with History(Path(history)) as store:
        for report in reports:
            imported = store.import_report(Path(report))
            print(report, imported.added, imported.known, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
