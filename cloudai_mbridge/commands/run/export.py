"""`mbridge export`: send the results of a run to a team's tools."""

from pathlib import Path

import click

from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.export import targets
from cloudai_mbridge.export.table import read_table
from cloudai_mbridge.files.replace import replacing, require_writable
from cloudai_mbridge.files.text import visible


@click.command()
@run_argument("root")
@click.option("--to", "target", type=click.Choice(targets.names()), required=True, help="Where results go.")
@click.option("--output", "-o", type=PATH, help="File to write, for csv, parquet and prometheus; default: stdout.")
@click.option(
    "--by", type=click.Choice(["run", "point"]), default="run", show_default=True, help="A row for each run or point."
)
def export(root: Path, target: str, output: Path | None, by: str) -> int:
    """Export the results of a run: a row for each run of a point.

    Where mlflow, wandb and otel send to, and their keys, is said by their own environment variables.
    """
    exporter = targets.find(target)
    is_service = hasattr(exporter, "send")
    if is_service and output is not None:
        raise BadInput(f"--output {output}: {target} writes no file; leave --output out")
    if getattr(exporter, "IS_BINARY", False) and output is None:
        raise BadInput(f"--to {target}: needs a file; add --output FILE")
    if output is not None:
        require_writable(output)
    table = read_table(root, by_point=by == "point")
    if table.so_far:
        click.echo(f"note: {visible(table.so_far)}", err=True)
    if is_service:
        click.echo(visible(exporter.send(table)))
        return OK
    content = exporter.render(table)
    if output is None:
        click.echo(content, nl=False)
        return OK
    with replacing(output) as unfinished:
        unfinished.write_bytes(content)
    click.echo(visible(f"written: {output} ({counted(len(table.rows), 'row')})"))
    return OK
