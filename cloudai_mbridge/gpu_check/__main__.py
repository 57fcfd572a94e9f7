"""Check a machine with a GPU: train, measure, compare, and write one JSON file. docs/gpu-check.md.

    python -m cloudai_mbridge.gpu_check --out gpu_check.json
    python -m cloudai_mbridge.gpu_check --out gpu_check.json --only matmul --only proxy

Exit codes: 0 no part failed; 1 a part failed; 2 the arguments are wrong, a package is missing, or the
machine cannot be probed; 130, 143 interrupted: the command under way is ended, the file holds what was found before.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# Including packages that the gate, the reports and the estimates import
_NEEDED = (
    *("torch", "megatron", "numpy", "einops", "yaml", "pydantic", "toml", "tomlkit", "click", "rich", "psutil"),
    *("scipy", "ruptures"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print a line for each, write the JSON after each."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m cloudai_mbridge.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--work-dir", type=Path, help="an empty directory for logs and results; default: a temporary one"
    )
    parser.add_argument("--only", action="append", metavar="PART", help="only this part; may be given several times")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on all times, for a busy machine")
    args = parser.parse_args(argv)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"error: not installed: {', '.join(missing)}; see docs/gpu-check.md", file=sys.stderr)
        return 2
    if not args.out.absolute().parent.is_dir():
        print(f"error: --out {args.out}: its directory does not exist", file=sys.stderr)
        return 2
    from cloudai_mbridge.gpu_check.run import run

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the command under way is ended too
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as own:
        work = (args.work_dir or Path(own)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            print(f"error: --work-dir {work}: is not empty", file=sys.stderr)
            return 2
        return run(args.out.absolute(), work, args.only, args.patience, started)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
