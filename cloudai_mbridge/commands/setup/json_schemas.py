"""JSON Schemas of the commands' `--json` output, generated from its types (docs/scripting.md)."""

import importlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cloudai_mbridge.commands.json_output import ErrorDocument
from cloudai_mbridge.models.json_schema import Schema

# The type of each command's document. `show` prints the report, which has a schema of its own
DOCUMENTS: Mapping[str, str] = {
    "list": "commands.plan.list_known:Known",
    "rule": "commands.plan.list_known:RuleDocs",
    "verify-configs": "commands.plan.verify:Findings",
    "dry-run": "commands.plan.dry_run:DryRun",
    "sweep plan": "commands.plan.sweep:SweepPlan",
    "sweep explain": "commands.plan.sweep:Explanation",
    "estimate": "estimate.point:Estimate",
    "tune": "commands.plan.tune:RankedLayouts",
    "calibrate": "commands.plan.calibrate:FittedFactors",
    "status": "commands.run.status:RunStatus",
    "logs": "commands.run.status:RunStatus",
    "runs": "commands.run.list_runs:Runs",
    "show": "",
    "generate-report": "commands.run.report:ReportWritten",
    "gate": "commands.gate.gate:GateDocument",
    "compare": "commands.gate.gate:ComparisonDocument",
    "baseline promote": "commands.gate.baseline:Promotion",
    "baseline show": "gate.baseline.model:Baseline",
    "baseline check": "commands.gate.baseline:BaselineCheck",
    "history import": "commands.gate.history:ImportedReports",
    "history list": "commands.gate.history:StoredPoints",
    "history show": "commands.gate.history:StoredRuns",
    "history trend": "gate.trend.analysis:Trends",
    "nodes show": "gate.nodes.verdicts:NodesResult",
}


class _DocumentSchema(GenerateJsonSchema):
    """The schema of what is printed: every field is always there."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the key is sufficient

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def kind_of(command: str) -> str:
    """Return the name of the schema of a command's document: json:sweep-plan."""
    return f"json:{command.replace(' --', '-').replace(' ', '-')}"


COMMANDS: Mapping[str, str] = {kind_of(command): command for command in DOCUMENTS}


def document_schema(kind: str) -> Schema:
    """Return the schema of a command's document, or of an error in its place."""
    command = COMMANDS[kind]
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": f"mbridge {command} --json"}
    if command == "show":
        return {**head, **_report_schema()}
    module, _, name = DOCUMENTS[command].partition(":")
    document: Any = getattr(importlib.import_module(f"cloudai_mbridge.{module}"), name)
    return {**head, **_schema_of(document | ErrorDocument)}


def _schema_of(form: Any) -> Schema:
    made = TypeAdapter[Any](form).json_schema(by_alias=False, mode="serialization", schema_generator=_DocumentSchema)
    return made


def _report_schema() -> Schema:
    """Return the schema of a report, of some of its points, or of an error."""
    report = json.loads(resources.files("cloudai_mbridge.report").joinpath("report.schema.json").read_text())
    own = {name: report.pop(name) for name in ("$schema", "$id", "$defs")}
    points = {"type": "object", "required": ["points"], "additionalProperties": False}
    points["properties"] = {"points": report["properties"]["points"]}
    error = _schema_of(ErrorDocument)
    forms = {"report": report, "points_of_report": points, **error.pop("$defs"), "ErrorDocument": error}
    assert not own["$defs"].keys() & forms
    names = ("report", "points_of_report", "ErrorDocument")
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**own["$defs"], **forms}}
