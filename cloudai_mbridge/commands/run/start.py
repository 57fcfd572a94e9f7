"""`mbridge run`."""

from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.options import DETACH, REJECTED, request_of, scenario_options
from cloudai_mbridge.commands.run.drive import drive, refuse_detaching, write


@click.command()
@scenario_options(output_dir=True)
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@click.option("--fail-fast", is_flag=True, help="Stop everything at the first run that fails.")
@DETACH
@REJECTED
def run(max_parallel: int | None, fail_fast: bool, detach: bool, all_rejected: bool, **options: Any) -> int:
    """Check, submit, watch and report all points of a scenario."""
    console = new_console()
    overrides = {"max_parallel": max_parallel, "fail_fast": fail_fast or None}
    prepared = pipeline.plan(request_of(options), {k: v for k, v in overrides.items() if v is not None})
    if detach:
        refuse_detaching(prepared.system)
    return drive(console, prepared, write(console, prepared, all_rejected=all_rejected), detach=detach)
