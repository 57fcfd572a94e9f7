"""`python -m cloudai_mbridge.training.schema` writes `schema.json` from the classes of this installation."""

import runpy

if __name__ == "__main__":
    runpy.run_module("cloudai_mbridge.training.config.text.schema_file", run_name="__main__")
