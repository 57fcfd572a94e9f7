"""Weights & Biases: a run for each run of a point, in one group. Its variables set the destination and the key.

On repeated export, a run replaces the run with its id.
"""

import os
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.export import errors_of, load
from cloudai_mbridge.export.table import DEFAULT_NAME, Row, RunTable, metrics, name_of, parameters, results

_LONGEST_NAME = 128


def send(table: RunTable) -> str:
    """Write the runs and return their number as text. ToolFailure: W&B cannot be reached, or has no key."""
    wandb = load("wandb", "wandb")
    project = os.environ.get("WANDB_PROJECT") or DEFAULT_NAME
    with errors_of("wandb", "wandb"):
        # nothing of this process is collected: output, code, arguments, packages
        off = dict.fromkeys(("disable_git", "disable_code", "x_disable_meta", "x_disable_stats"), True)
        settings = wandb.Settings(silent=True, console="off", x_save_requirements=False, **off)
        try:
            offline = [_write(wandb, settings, project, table, row) for row in table.ran]
        finally:
            wandb.teardown()  # until then, files may be incomplete
    where = f"below {offline[0]}; send them with: wandb sync" if any(offline) else f"in project {project!r}"
    return f"wandb: {counted(len(offline), 'run')} written {where}"


def _write(wandb: Any, settings: Any, project: str, table: RunTable, row: Row) -> Path | None:
    """Write a row; return the directory of its files if they stay on this machine."""
    run = wandb.init(
        project=project,
        id=table.id_of(row),
        name=name_of(row)[:_LONGEST_NAME],
        group=table.run[:_LONGEST_NAME],
        job_type=str(row["test"])[:64],
        config=parameters(table, row),
        settings=settings,
        reinit="finish_previous",
    )
    try:
        run.summary.update({**metrics(row), **results(row)})
    finally:
        run.finish(exit_code=0 if row["verdict"] == "success" else 1)
    return Path(run.settings.sync_dir).parent if run.offline else None
