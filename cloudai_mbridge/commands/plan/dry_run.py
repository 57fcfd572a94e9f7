"""`mbridge dry-run`."""

from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console, show_rejected
from cloudai_mbridge.commands.options import request_of, scenario_options
from cloudai_mbridge.errors import OK, POINTS_FAILED, counted


@click.command("dry-run")
@scenario_options(output_dir=True)
def dry_run(**options: Any) -> int:
    """Check all points and write exactly the files that `run` would submit."""
    console = new_console()
    prepared = pipeline.plan(request_of(options))
    show_rejected(console, prepared.plan)
    root = pipeline.write(prepared, dry_run=True)
    for planned in prepared.plan.runs:
        if planned.is_again:
            continue
        placed = f"{counted(planned.world_size, 'rank')} on {counted(planned.num_nodes, 'node')}"
        console.print_line(f"accepted {planned.key}: {placed}")
    console.print_line(f"written: {root}")
    return OK if prepared.plan.runs else POINTS_FAILED
