"""`mbridge schema`: schemas of the TOML files, for editors, and of the commands' output, for programs."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import click

from cloudai_mbridge.commands.setup.json_schemas import COMMANDS, document_schema
from cloudai_mbridge.errors import OK
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.models.json_schema import Schema, definition_schema, scenario_schema, system_schema, toml_schema

KINDS: Mapping[str, Callable[[], Schema]] = {
    "test": definition_schema,
    "scenario": scenario_schema,
    "system": system_schema,
    "policy": partial(toml_schema, GatePolicy, "mbridge gate policy"),
}


@click.command()
@click.argument("kind", metavar="KIND", type=click.Choice([*KINDS, *COMMANDS]))
def schema(kind: str) -> int:
    """Print the JSON Schema of a KIND of TOML file, for editors: test, scenario, system or policy.

    Or of what a command prints with --json: json:COMMAND, such as json:sweep-plan.
    """
    click.echo(_text(kind), nl=False)
    return OK


def schema_files(directory: Path, *kinds: str) -> dict[Path, str]:
    """Return the schemas of the given kinds by their paths below a directory."""
    return {_path(directory, kind): _text(kind) for kind in kinds}


def schema_line(path: Path, directory: Path, kind: str) -> str:
    """Return the first line of a TOML file, which links to its schema for editors."""
    return f"#:schema {os.path.relpath(_path(directory, kind), path.parent)}\n"


def _path(directory: Path, kind: str) -> Path:
    return directory / "schemas" / f"{kind}.json"


def _text(kind: str) -> str:
    return json.dumps(KINDS[kind]() if kind in KINDS else document_schema(kind), indent=2) + "\n"
