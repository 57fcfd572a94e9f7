"""`mbridge dry-run`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console, print_json, show_rejected
from cloudai_mbridge.commands.options import JSON, REJECTED, rehearse_options, request_of, scenario_options
from cloudai_mbridge.commands.plan.rehearse import rehearse_into
from cloudai_mbridge.errors import OK, POINTS_FAILED, counted
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.plan import RejectedPoint
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.rehearsal import Rehearsal

_PLANNED_RUN = json_object(
    "PlannedRun",
    "A run whose files were written, in its directory `key` below the root. world_size: ranks.",
    key=str,
    test_id=str,
    label=str,
    iteration=int,
    coordinates=Mapping[str, Any],
    num_nodes=int,
    world_size=int,
)
DRY_RUN = json_object(
    "DryRun",
    """Points that `run` would submit. rejected: at most the first thousand points of a test; rule_counts is over all.

    left_out: points that were not chosen. path: null if a rehearsal refused all points: nothing was written.
    rehearsal: null without `--rehearse`.
    """,
    path=Path | None,
    scenario=str,
    system=str,
    runs=[_PLANNED_RUN],
    num_rejected=int,
    rule_counts=Mapping[str, int],
    rejected=tuple[RejectedPoint, ...],
    notes=tuple[str, ...],
    left_out=tuple[LeftOut, ...],
    rehearsal=Rehearsal | None,
)


@click.command("dry-run")
@scenario_options(output_dir=True)
@REJECTED
@rehearse_options
@JSON
def dry_run(as_json: bool, all_rejected: bool, rehearse: str | None, on_slurm: bool, **options: Any) -> int:
    """Check all points and write exactly the files that `run` would submit."""
    console = new_console()
    prepared = pipeline.plan(request_of(options))
    if rehearse:
        prepared = rehearse_into(console, prepared, rehearse, on_slurm=on_slurm, is_quiet=as_json)
    if not as_json:
        show_rejected(console, prepared.plan, in_full=all_rejected)
    are_refused = prepared.rehearsal is not None and not prepared.plan.runs
    root = None if are_refused else pipeline.write(prepared, dry_run=True)
    planned_runs = [run for run in prepared.plan.runs if not run.is_again]
    if as_json:
        runs = [fill(_PLANNED_RUN, run) for run in planned_runs]
        print_json(fill(DRY_RUN, prepared.plan, path=root, runs=runs, rehearsal=prepared.rehearsal), DRY_RUN)
        return OK if planned_runs else POINTS_FAILED
    for planned in planned_runs:
        placed = f"{counted(planned.world_size, 'rank')} on {counted(planned.num_nodes, 'node')}"
        console.print_line(f"accepted {planned.key}: {placed}")
    console.print_line(f"written: {root}" if root else "every point is rejected: nothing was written")
    return OK if prepared.plan.runs else POINTS_FAILED
