"""Run a launcher's dry run once per command line: python launch_many.py LAUNCHER STARTER COMMANDS.json OUT.

The launcher's imports take seconds, so this process imports NeMo-Run and forks for each. STARTER is start_launcher.py.
COMMANDS.json holds lists of arguments; OUT/N.log gets what the launcher prints, OUT/codes.json the exit codes.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

import nemo_run  # noqa: F401 - what takes long
import wandb  # noqa: F401


def main(launcher: str, starter: str, commands: str, out: str) -> None:
    spec = importlib.util.spec_from_file_location("start_launcher", starter)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    codes = []
    for i, argv in enumerate(json.loads(Path(commands).read_text())):
        pid = os.fork()
        if pid == 0:
            _run(module, launcher, argv, Path(out, f"{i}.log"))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    Path(out, "codes.json").write_text(json.dumps(codes))


def _run(module: object, launcher: str, argv: list[str], log: Path) -> None:
    """Run in a fork and end it."""
    code = 1
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(Path(launcher).parent)
    try:
        module.main(launcher, argv)  # type: ignore[attr-defined]
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
