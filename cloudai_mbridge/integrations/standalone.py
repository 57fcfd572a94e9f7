"""Train a point on this machine for CloudAI, which ends a job with SIGKILL to one process: `python -m ... DIRECTORY`.

The process that CloudAI starts runs a second process, which starts the point's script, is notified by the kernel when
the first process ends, and then ends every process of the point.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

from cloudai_mbridge.launch.script import PYTHON_VARIABLE
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.schedulers.local import Child

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_UNDER = "--under"


def main(arguments: list[str]) -> int:
    """Start the second process, or act as it; return the script's exit code."""
    if arguments[0] == _UNDER:
        return _train(int(arguments[1]), Path(arguments[2]))
    module = "cloudai_mbridge.integrations.standalone"
    command = [sys.executable, "-m", module, _UNDER, str(os.getpid()), arguments[0]]
    second = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: second.terminate())
    return second.wait()


def _train(parent: int, directory: Path) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    env = {PYTHON_VARIABLE: sys.executable, **os.environ}
    child = Child.start(f"cloudai-{uuid4().hex}", POINT_FILES.local_script, directory, env)
    try:
        while (code := child.poll()) is None:
            time.sleep(0.1)
    finally:
        child.end()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
