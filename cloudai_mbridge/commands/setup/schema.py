"""`mbridge schema`: what editors need to know of our TOML files."""

import json
from collections.abc import Callable, Mapping
from functools import partial

import click

from cloudai_mbridge.errors import OK
from cloudai_mbridge.gate.compare.policy import GatePolicy
from cloudai_mbridge.models.json_schema import Schema, definition_schema, scenario_schema, system_schema, toml_schema

KINDS: Mapping[str, Callable[[], Schema]] = {
    "test": definition_schema,
    "scenario": scenario_schema,
    "system": system_schema,
    "policy": partial(toml_schema, GatePolicy, "mbridge gate policy"),
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
def schema(kind: str) -> int:
    """Print the JSON Schema of a KIND of TOML file, for editors."""
    click.echo(json.dumps(KINDS[kind](), indent=2))
    return OK
