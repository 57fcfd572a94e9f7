"""Schemas of the TOML files, for editors, and of the commands' `--json` output, for programs (docs/scripting.md)."""

import importlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cloudai_mbridge.errors import OK
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.models.json_schema import Schema, definition_schema, scenario_schema, system_schema, toml_schema

# The type of each command's document. `show` prints the report, which has a schema of its own
DOCUMENTS: Mapping[str, str] = {
    "list": "commands.plan.list_known:KNOWN",
    "rule": "commands.plan.list_known:RULE_DOCS",
    "verify-configs": "commands.plan.verify:FINDINGS",
    "dry-run": "commands.plan.dry_run:DRY_RUN",
    "rehearse": "rehearsal:Rehearsal",
    "sweep plan": "commands.plan.sweep_documents:SWEEP_PLAN",
    "sweep explain": "commands.plan.sweep_documents:EXPLANATION",
    "estimate": "estimate.point:Estimate",
    "tune": "commands.plan.tune:RANKED_LAYOUTS",
    "calibrate": "estimate.hardware:FittedFactors",
    "status": "runner.control:RunStatus",
    "logs": "runner.control:RunStatus",
    "runs": "commands.run.status:RUNS",
    "show": "",
    "generate-report": "commands.run.results:REPORT_WRITTEN",
    "gate": "commands.gate.gate:GATE_DOCUMENT",
    "compare": "commands.gate.gate:COMPARISON_DOCUMENT",
    "baseline promote": "commands.gate.baseline:PROMOTION",
    "baseline show": "gate.baseline:Baseline",
    "baseline check": "commands.gate.baseline:BASELINE_CHECK",
    "history import": "commands.gate.history:IMPORTED_REPORTS",
    "history list": "commands.gate.history:STORED_POINTS",
    "history show": "commands.gate.history:STORED_RUNS",
    "history trend": "gate.trend:TRENDS",
    "nodes show": "gate.nodes:NodesResult",
}


_ERROR = json_object(
    "Error",
    "An error. kind: its class. messages: one per line of the text on standard error.",
    kind=str,
    exit_code=int,
    messages=tuple[str, ...],
)
ERROR_DOCUMENT = json_object("ErrorDocument", "What a command prints in place of its document.", error=_ERROR)


class _DocumentSchema(GenerateJsonSchema):
    """The schema of what is printed: every field is always there."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the key is sufficient

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


COMMANDS: Mapping[str, str] = {f"json:{command.replace(' ', '-')}": command for command in DOCUMENTS}


def document_schema(kind: str) -> Schema:
    """Return the schema of a command's document, or of an error in its place."""
    command = COMMANDS[kind]
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": f"mbridge {command} --json"}
    if command == "show":
        return {**head, **_report_schema()}
    module, _, name = DOCUMENTS[command].partition(":")
    document: Any = getattr(importlib.import_module(f"cloudai_mbridge.{module}"), name)
    return {**head, **_schema_of(document | ERROR_DOCUMENT)}


def _schema_of(form: Any) -> Schema:
    return TypeAdapter[Any](form).json_schema(by_alias=False, mode="serialization", schema_generator=_DocumentSchema)


def _report_schema() -> Schema:
    """Return the schema of a report, of some of its points, or of an error."""
    report = json.loads(resources.files("cloudai_mbridge.report").joinpath("report.schema.json").read_text())
    own = {name: report.pop(name) for name in ("$schema", "$id", "$defs")}
    points = {"type": "object", "required": ["points"], "additionalProperties": False}
    points["properties"] = {"points": report["properties"]["points"]}
    error = _schema_of(ERROR_DOCUMENT)
    forms = {"report": report, "points_of_report": points, **error.pop("$defs"), "ErrorDocument": error}
    assert not own["$defs"].keys() & forms
    names = ("report", "points_of_report", "ErrorDocument")
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**own["$defs"], **forms}}


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
