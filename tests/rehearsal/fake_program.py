"""A stand-in for the interpreter of a job: `python -m cloudai_mbridge.training.dry` prints what the test says.

FAKE_REHEARSAL: JSON with `events` to print, `code` to end with, `said` for standard error, `sleep` seconds before the
end, in a child too, `note`: a directory that gets a file per start, with the variables and the pids.
Anything else is a question about packages, which the real interpreter answers.
"""

import json
import os
import sys
import time
from pathlib import Path

REAL = "@PYTHON@"


def main() -> int:
    if sys.argv[1:3] != ["-m", "cloudai_mbridge.training.dry"]:
        os.execv(REAL, [REAL, *sys.argv[1:]])
    told = json.loads(os.environ["FAKE_REHEARSAL"])
    pids = [os.getpid()]
    if told.get("sleep") and (child := os.fork()) == 0:
        time.sleep(told["sleep"])
        os._exit(0)
    elif told.get("sleep"):
        pids.append(child)
    if note := told.get("note"):
        here = {"argv": sys.argv[1:], "env": dict(os.environ), "pids": pids, "cwd": os.getcwd()}
        unfinished = Path(note, f"{os.getpid()}.new")
        unfinished.write_text(json.dumps(here | {"config": json.loads(Path("training.json").read_text())}))
        unfinished.rename(unfinished.with_suffix(".json"))
    for event in told.get("events", ()):
        print(json.dumps(event), flush=True)
    print(told.get("said", ""), file=sys.stderr, flush=True)
    time.sleep(told.get("sleep", 0))
    return int(told.get("code", 0))


sys.exit(main())
