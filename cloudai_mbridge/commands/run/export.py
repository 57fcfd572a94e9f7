"""`mbridge export`: send the results of a run to a team's tools."""

from collections.abc import Callable, Mapping
from pathlib import Path

import click

from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.export.csv_file import render_csv
from cloudai_mbridge.export.mlflow import send_mlflow
from cloudai_mbridge.export.otel import send_otel
from cloudai_mbridge.export.parquet_file import render_parquet
from cloudai_mbridge.export.prometheus import render_prometheus
from cloudai_mbridge.export.table import RunTable, read_table
from cloudai_mbridge.export.wandb import send_wandb
from cloudai_mbridge.files.replace import replacing, require_writable
from cloudai_mbridge.files.text import visible

_FILES: Mapping[str, Callable[[RunTable], bytes]] = {
    "csv": lambda table: render_csv(table).encode(),
    "parquet": render_parquet,
    "prometheus": render_prometheus,
}
_SERVICES: Mapping[str, Callable[[RunTable], str]] = {"mlflow": send_mlflow, "wandb": send_wandb, "otel": send_otel}


@click.command()
@run_argument("root")
@click.option("--to", "target", type=click.Choice([*_FILES, *_SERVICES]), required=True, help="Where results go.")
@click.option("--output", "-o", type=PATH, help="File to write: csv, parquet or prometheus; default: stdout.")
@click.option(
    "--by", type=click.Choice(["run", "point"]), default="run", show_default=True, help="A row for each run or point."
)
def export(root: Path, target: str, output: Path | None, by: str) -> int:
    """Export the results of a run: a row for each run of a point.

    Where mlflow, wandb and otel send to, and their keys, is said by their own environment variables.
    """
    if target in _SERVICES and output is not None:
        raise BadInput(f"--output {output}: {target} writes no file; leave --output out")
    if target == "parquet" and output is None:
        raise BadInput("--to parquet: needs a file; add --output FILE")
    if output is not None:
        require_writable(output)
    table = read_table(root, by_point=by == "point")
    if table.so_far:
        click.echo(f"note: {visible(table.so_far)}", err=True)
    if target in _SERVICES:
        click.echo(visible(_SERVICES[target](table)))
        return OK
    content = _FILES[target](table)
    if output is None:
        click.echo(content, nl=False)
        return OK
    with replacing(output) as unfinished:
        unfinished.write_bytes(content)
    click.echo(visible(f"written: {output} ({counted(len(table.rows), 'row')})"))
    return OK
