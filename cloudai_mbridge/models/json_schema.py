"""JSON Schemas of the TOML files, for editors: the single-file errors of `verify-configs`, without false positives.

Draft 7, which taplo reads. A schema covers one file only, and TOML's dates are text.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cloudai_mbridge.models.loading import FOREIGN_SCHEDULERS, SCHEDULERS, TEMPLATE_KEY
from cloudai_mbridge.models.scenario import DEFINITION_KEYS, TestScenario
from cloudai_mbridge.models.test_definition import TEMPLATE, TestDefinition

Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"
# Texts that pydantic converts to numbers and booleans; JSON Schema has no flag to ignore case
_INTEGER = r"^\s*[+-]?[0-9_]+(\.0*)?\s*$"
_NUMBER = r"^\s*[+-]?([0-9_.]+([eE][+-]?[0-9_]+)?|[iI][nN][fF]([iI][nN][iI][tT][yY])?|[nN][aA][nN])\s*$"
_BOOLEAN = (
    "^([01]|[oO][nN]|[oO][fF][fF]|[tT]|[tT][rR][uU][eE]|[fF]|[fF][aA][lL][sS][eE]|[yY]|[yY][eE][sS]|[nN]|[nN][oO])$"
)


class _TomlSchema(GenerateJsonSchema):
    """The schema of a model in TOML, which has no null.

    is_lax: the model takes text for a number, and pydantic's other conversions.
    """

    def __init__(self, *, is_lax: bool) -> None:
        super().__init__()
        self._is_lax = is_lax

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the key implies it already

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        if made.get("default") is None or isinstance(made["default"], dict):
            made.pop("default", None)
        return made

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        """Return one schema for options of different types: a validator then reports the error and its place."""
        made = super().union_schema(schema)
        options = made.get("anyOf", [])
        types = [name for option in options for name in _types(option)]
        if not types or len(set(types)) < len(types) or any(_is_more_than_a_type(option) for option in options):
            return made
        return {**{key: value for option in options for key, value in option.items()}, "type": types}

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        made = super().int_schema(schema)
        return {**made, "type": ["integer", "boolean", "string"], "pattern": _INTEGER} if self._is_lax else made

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        made = super().float_schema(schema)
        if not self._is_lax:
            return made
        types = ["number", "boolean", "string"]
        if schema.get("allow_inf_nan", True):
            types.append("null")  # taplo's value for inf
        return {**made, "type": types, "pattern": _NUMBER}

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        if not self._is_lax:
            return super().bool_schema(schema)
        numbers = {"minimum": 0, "maximum": 1}
        return {"type": ["boolean", "integer", "string"], **numbers, "pattern": _BOOLEAN}


def _types(schema: Schema) -> list[str]:
    found = schema.get("type", [])
    return [found] if isinstance(found, str) else found


def _is_more_than_a_type(schema: Schema) -> bool:
    return bool({"enum", "const", "anyOf", "$ref"} & schema.keys()) or not _types(schema)


def toml_schema(model: type[BaseModel], title: str) -> Schema:
    generator = _TomlSchema(is_lax=not model.model_config.get("strict"))
    made = generator.generate(model.__pydantic_core_schema__)
    return {"$schema": _DRAFT, **_inlined(made, made.pop("$defs", {})), "title": title}


def _inlined(schema: Any, definitions: Schema) -> Any:
    """Inline referenced definitions: draft 7 ignores keys next to a reference.

    An unknown key gets a separate error: at `false`, taplo marks the whole table.
    """
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        named = definitions[reference.rpartition("/")[2]]
        schema = {**named, **{key: value for key, value in schema.items() if key != "$ref"}}
        schema.pop("title", None)
    if schema.get("additionalProperties") is False:
        schema = {**schema, "additionalProperties": {"not": {"description": "unknown key"}}}
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def definition_schema() -> Schema:
    """Return the schema of a test definition. It does not constrain other templates."""
    made = toml_schema(TestDefinition, "mbridge test definition")
    return {
        **{key: made.pop(key) for key in ("$schema", "title")},
        **_if_ours("#/definitions/test"),
        "definitions": {"test": made},
    }


def scenario_schema() -> Schema:
    """Return the schema of a scenario. An entry's settings of a definition are checked as in a definition.

    The template of `test_name` is in another file: the schema assumes ours.
    """
    made = toml_schema(TestScenario, "mbridge scenario")
    entry = made["properties"]["Tests"]["items"]
    definition = toml_schema(TestDefinition, "")["properties"]
    for key in DEFINITION_KEYS:
        entry["properties"][key]["description"] = definition[key]["description"]
    entry |= _if_ours("#/definitions/test")
    return {**made, "definitions": {"test": {"properties": {key: definition[key] for key in DEFINITION_KEYS}}}}


def _if_ours(reference: str) -> Schema:
    """Apply a definition if the template is ours. Editors look for keys in anyOf, which applies to everything."""
    return {
        "if": {"properties": {TEMPLATE_KEY: {"const": TEMPLATE}}},
        "then": {"$ref": reference},
        "anyOf": [{"$ref": reference}, True],
    }


def system_schema() -> Schema:
    """Return the schema of a system. For schedulers that only CloudAI has, it does not constrain other keys."""
    models = {model.__name__: toml_schema(model, "") for model in SCHEDULERS.values()}
    references = {name: {"$ref": f"#/definitions/{name}"} for name in models}
    for made in models.values():
        del made["$schema"], made["title"]
    return {
        "$schema": _DRAFT,
        "title": "mbridge system",
        "type": "object",
        "required": ["scheduler"],
        "properties": {"scheduler": {"enum": [*SCHEDULERS, *FOREIGN_SCHEDULERS]}},
        "allOf": [
            {
                "if": {"required": ["scheduler"], "properties": {"scheduler": {"const": name}}},
                "then": references[model.__name__],
            }
            for name, model in SCHEDULERS.items()
        ],
        "anyOf": [*references.values(), True],
        "definitions": models,
    }
