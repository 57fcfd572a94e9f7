"""`python -m cloudai_mbridge.training.schema` writes `schema.json` from the classes of this installation."""

from cloudai_mbridge.training.schema.check import SCHEMA_FILE
from cloudai_mbridge.training.schema.write import generate_schema

if __name__ == "__main__":
    SCHEMA_FILE.write_text(generate_schema(), encoding="utf-8")
    print(SCHEMA_FILE)
