"""Names of every file of a run, and the index of this user's runs, for commands that find a run by its name.

The index has a path per line. It is a convenience: write failures are ignored, and readers ignore missing directories.
"""

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from cloudai_mbridge.files.regular import read_regular


class _PointFiles(SimpleNamespace):
    """Files in a point's directory. Scripts name them relatively, so a script is the same wherever it is written."""

    local_script: Final = "run.sh"
    slurm_script: Final = "job.sbatch"
    launcher_script: Final = "launcher.sh"
    launcher_starter: Final = "start_launcher.py"
    launcher_log: Final = "cloudai_megatron_bridge_launcher.log"  # CloudAI's name
    slurm_job_id: Final = "slurm_job_id.txt"
    nemorun_home: Final = "nemo_run"
    training_config: Final = "training.json"
    definition: Final = "test.toml"
    stdout: Final = "stdout.txt"
    stderr: Final = "stderr.txt"
    started: Final = "started.txt"
    claim: Final = "claim.{}"  # of an attempt, with its token
    not_counted: Final = "not_counted.txt"  # jobs that found their attempt claimed
    exit_code: Final = "exit_code.txt"
    stacks: Final = "stacks"
    attempt: Final = "attempt-{}"
    report: Final = "report.txt"
    rehearsal_script: Final = "rehearse.sh"


class _RootFiles(SimpleNamespace):
    """Files in the directory of a whole run."""

    plan: Final = "plan.json"
    unfinished_plan: Final = "plan.json.new"
    system: Final = "system.toml"
    arrays: Final = "arrays"
    rehearsal: Final = "rehearsal.json"
    driver_lock: Final = "driver.lock"
    submit_lock: Final = "submit.lock"
    cancel_request: Final = "cancel.request"
    journal: Final = "journal.sqlite"
    submissions: Final = "submissions.jsonl"
    report: Final = "report.json"
    summary: Final = "report.txt"
    report_html: Final = "report.html"
    markdown: Final = "report.md"
    junit: Final = "junit.xml"
    steps_csv: Final = "steps.csv"
    steps_parquet: Final = "steps.parquet"


ROOT_NAME: Final = "{scenario}_{now:%Y-%m-%d_%H-%M-%S}{suffix}"  # created by `run`; UTC
IS_ROOT_NAME: Final = re.compile(r".*_(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:_(\d+))?")

POINT_FILES = _PointFiles()
ROOT_FILES = _RootFiles()


def started_at(root: Path) -> tuple[datetime, int]:
    """Return the start time of a run, and its number within that second: from its name, else from its plan's time.

    A copied directory keeps its name, not always the times of its files.
    """
    if match := IS_ROOT_NAME.fullmatch(root.name):
        with contextlib.suppress(ValueError):
            return datetime.strptime(match[1], "%Y-%m-%d_%H-%M-%S").replace(tzinfo=UTC), int(match[2] or 0)
    try:
        return datetime.fromtimestamp(os.stat(root / ROOT_FILES.plan).st_mtime, UTC), 0
    except OSError:
        return datetime.min.replace(tzinfo=UTC), 0


def walk_without_runs(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return all that is below a directory, links included, and the run directories that were left out, both in order.

    A run's directory has copies of tests and systems, which are results. The directory itself may be one.
    """
    found: list[Path] = []
    runs: list[Path] = []
    for place, directories, files in os.walk(directory):
        here = Path(place)
        own = [here / name for name in directories if _has_plan(here / name)]
        runs += own
        directories[:] = [name for name in directories if here / name not in own]
        found += (here / name for name in (*directories, *files))
    return sorted(found), sorted(runs)


def _has_plan(path: Path) -> bool:
    plans = (ROOT_FILES.plan, ROOT_FILES.unfinished_plan)
    return (path / ROOT_FILES.system).is_file() and any((path / name).is_file() for name in plans)


_MOST_READ = 1000  # the last entries; each costs a file-system access


def index_path() -> Path | None:
    """Return the index, in the user's XDG state directory; None if the user has no such directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification ignores relative paths
        state = os.path.expanduser("~/.local/state")
    return Path(state, "mbridge", "runs.txt") if os.path.isabs(state) else None


def record_run(root: Path) -> None:
    """Add a run's directory to the index, if that is possible."""
    if (path := index_path()) is None or "\n" in str(root):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(os.fsencode(root) + b"\n")


def recorded_runs() -> list[Path]:
    """Return the directories in the index; they need not exist."""
    path, lines = index_path(), list[bytes]()
    if path is not None:
        with contextlib.suppress(OSError):
            lines = read_regular(path).split(b"\n")[-_MOST_READ - 1 : -1]
    return [Path(os.fsdecode(line)) for line in lines if os.path.isabs(line) and b"\0" not in line]
