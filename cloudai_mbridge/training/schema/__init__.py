"""Names and types of every config key as data, for programs without torch. Standard library only."""

from cloudai_mbridge.training.schema.check import check_section_values
from cloudai_mbridge.training.schema.forms import SCHEMA_FILE, load_schema

__all__ = ["SCHEMA_FILE", "check_section_values", "load_schema"]
