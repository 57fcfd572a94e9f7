"""A command of mbridge within bounds of CPU time and memory, for test_fuzz.py: `bounded.py SECONDS BYTES ARGUMENT...`.

The exit code is 70 with an exception that is not handled, and 71 with a text in place of a code.
"""

import resource
import sys
import traceback
from pathlib import Path


def main(seconds: int, memory: int, *arguments: str) -> int:
    """Run the command; the memory is what it may take beside what was imported before."""
    from cloudai_mbridge import cli

    memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.argv = ["mbridge", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return 71 if isinstance(end.code, str) else int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
