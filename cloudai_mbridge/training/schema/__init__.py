"""Names and types of every config key as data, for programs without torch. Standard library only."""

from cloudai_mbridge.training.schema.check import check_section_values, load_schema
from cloudai_mbridge.training.schema.releases import SCHEMA_FILE

__all__ = ["SCHEMA_FILE", "check_section_values", "load_schema"]
