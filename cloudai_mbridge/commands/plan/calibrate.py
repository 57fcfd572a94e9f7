"""`mbridge calibrate`: correction factors of the predictions for a cluster, from runs on it."""

from pathlib import Path

import click
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import SteadyConsole, new_console, print_json
from cloudai_mbridge.commands.options import COMPLETE_GPU, JSON, PATH, run_argument
from cloudai_mbridge.commands.plan import require_new, write_new
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.estimate.hardware import FACTORS, ClusterFactors, FittedFactors, gpu_named
from cloudai_mbridge.files.documents import render_toml

_MOST_REASONS = 5
_FAR_OFF = 0.9  # a median error: measured ten times as long as predicted, or about half as long


@click.command()
@run_argument("results", "RUN...", nargs=-1, required=True)
@click.option("--gpu", shell_complete=COMPLETE_GPU, help="GPU type to calibrate, if the runs have several.")
@click.option("--output", type=PATH, help="File to write, which a system names as its `calibration`.")
@JSON
def calibrate(results: tuple[Path, ...], gpu: str | None, output: Path | None, as_json: bool) -> int:
    """Fit the predictions of time and memory to results; a RUN may be its report.json, or a CSV table.

    See docs/tune.md.
    """
    from cloudai_mbridge.tune.calibrate import calibrate as fit  # numpy and scipy, for this command only
    from cloudai_mbridge.tune.measured import read_measurements

    if output is not None:
        require_new("--output", output)
    points, left_out = read_measurements(results)
    if not points:
        why = "; ".join(f"{why} ({count})" for why, count in list(left_out.items())[:_MOST_REASONS])
        raise BadInput(f"no point has both a measured and a predicted step time: {why or 'there are no points'}")
    name = gpu_named(gpu).name if gpu else next(iter(points))
    if gpu is None and len(points) > 1:
        raise BadInput(f"there are points of {', '.join(points)}; say which with --gpu")
    if name not in points:
        raise BadInput(f"--gpu: there are no points of {name}, but of {', '.join(points)}")
    found = fit(name, points[name], left_out)
    if output is not None:
        factors = found.model_dump(include=set(ClusterFactors.model_fields))
        write_new("--output", output, f"# Written by `mbridge calibrate`\n{render_toml(factors)}")
    if as_json:
        print_json(found)
    else:
        _show(new_console(), found)
    if output is not None:
        click.echo(f"written: {output}", err=as_json)
    return OK


def _show(console: SteadyConsole, found: FittedFactors) -> None:
    error = found.held_out
    console.print_line(f"{counted(found.points, 'measured point')} of {found.gpu}")
    for why, count in list(found.left_out.items())[:_MOST_REASONS]:
        console.print_line(f"left out, {counted(count, 'point')}: {why}")
    if more := sum(list(found.left_out.values())[_MOST_REASONS:]):
        console.print_line(f"left out for other reasons: {counted(more, 'point')}")
    if found.is_better:
        table = Table("step time of", Column("measured / predicted", justify="right"))
        for name in FACTORS:
            table.add_row(Text(name), f"{getattr(found.step_time, name):.3g}")
        console.print(table)
        errors = f"{error.shipped:.1%} before, {error.calibrated:.1%} after"
        console.print_line(f"median error of step times on points held out: {errors}")
    else:
        fitted = f"calibrated, it is {found.error:.1%}, and {found.share_better:.0%} of them are predicted better"
        held_out = f"median error on points held out {error.shipped:.1%}"
        console.print_line(f"step times: left as they are ({held_out}): {fitted}")
    if min(error.shipped, found.error) > _FAR_OFF:
        console.print_line("these times are far from any prediction; check the GPU, and that they are in seconds")
    known = f"measured at {counted(found.memory_points, 'point')}" if found.memory_points else "not measured"
    console.print_line(f"memory: {known}, factor {found.memory:.3g}")
