"""Job arrays: runs that need the same resources share one submission, and each still runs its own script.

An array has a directory of links, index -> the run's directory. Slurm opens a task's output through its link, and the
array's script goes there and starts the run's script, which is the same as for a single submission.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path

from cloudai_mbridge.files.disk import naming
from cloudai_mbridge.launch.script import directive, sbatch_options
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan


def array_script(array: str) -> str:
    """Return the path of an array's script below the root."""
    return f"{array}/array.sbatch"


def render_array_script(array: str, first: RunPlan, system: SlurmSystem) -> str:
    """Render the script of an array; it starts in the root."""
    output = {"output": f"{array}/%a/{POINT_FILES.stdout}", "error": f"{array}/%a/{POINT_FILES.stderr}"}
    options = sbatch_options(first, system, {"job-name": f"mbridge-{array.replace('/', '-')}", **output})
    lines = [
        "#!/bin/bash",
        *map(directive, options),
        f"# mbridge {array}: each task runs the script of the run that its link names",
        f'cd -P {shlex.quote(array)}/"$SLURM_ARRAY_TASK_ID" && exec bash {POINT_FILES.slurm_script}',
    ]
    return "\n".join(lines) + "\n"


def write_arrays(runs: Iterable[RunPlan], system: SlurmSystem, root: Path) -> None:
    """Write the scripts and links of all arrays below `root`."""
    for run in runs:
        if not run.array:
            continue
        directory = root / run.array
        if not directory.exists():
            directory.mkdir(parents=True)
            script = render_array_script(run.array, run, system)
            with naming(root / array_script(run.array)):
                (root / array_script(run.array)).write_text(script, encoding="utf-8")
        (directory / str(run.array_index)).symlink_to(Path("../..", run.key), target_is_directory=True)
