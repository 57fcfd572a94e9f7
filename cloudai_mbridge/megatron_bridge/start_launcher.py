"""Start Megatron-Bridge's launcher so that it writes no credential: python start_launcher.py LAUNCHER ARGUMENT...

A copy of this file lies next to every launcher's script and runs in the launcher's environment; it needs the standard
library only. `-hf` and `-wdk` name a variable in place of its value: that enables online mode and W&B, in the
launcher and in the ranks, which only check whether a value exists. The launcher would export the two into the batch
script and NeMo-Run would keep them in its records, so both are removed before NeMo-Run sees them. The values stay in
this process's environment; sbatch and srun carry it into the job.
"""

import contextlib
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

CREDENTIALS = ("HF_TOKEN", "WANDB_API_KEY")


def main(launcher: str, arguments: list[str]) -> None:
    """Run the launcher in this process, as if it had been started itself."""
    sys.argv = [launcher, *arguments]
    sys.path[0] = str(Path(launcher).parent)
    with contextlib.suppress(ModuleNotFoundError):  # the launcher reports it
        guard(import_module("nemo_run"))
    runpy.run_path(launcher, run_name="__main__")


def guard(nemo_run: Any) -> None:
    """Make nemo_run.run drop credentials from an executor's exports."""
    submit = nemo_run.run

    def run(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for name in CREDENTIALS:
                getattr(value, "env_vars", {}).pop(name, None)
        return submit(*args, **kwargs)

    nemo_run.run = run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
