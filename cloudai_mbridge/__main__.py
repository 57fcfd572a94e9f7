"""The command `mbridge`, also as `python -m cloudai_mbridge`: a process from its first signal to its last."""

import signal
from typing import NoReturn

from cloudai_mbridge.start_up import leaving_at_once


def run() -> NoReturn:
    """Import and run the command line. At its very end a SIGINT no longer changes the exit code."""
    with leaving_at_once():
        from cloudai_mbridge.cli import main
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    run()
