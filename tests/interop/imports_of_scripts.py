"""Execute every renamed import of upstream's scripts: imports_of_scripts.py SOURCE; prints what became of each."""

import ast
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.interop.renamed import rename

FOLDERS = ("examples", "tutorials", "scripts", "tests/functional_tests/test_groups/training")


def imports(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, statement) for every import of the renamed package, of one name each."""
    for folder in FOLDERS:
        for file in sorted((source / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(rename(file.read_text()))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cloudai_mbridge"):
                    for each in node.names:
                        yield str(file.relative_to(source)), f"from {node.module} import {each.name}"
                if isinstance(node, ast.Import):
                    for each in node.names:
                        if each.name.startswith("cloudai_mbridge"):
                            yield str(file.relative_to(source)), f"import {each.name}"


def outcome(statement: str) -> str:
    """Return "" or the error, with its kind in front."""
    try:
        exec(statement, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, str]] = {}
    known: dict[str, str] = {}
    for file, statement in imports(Path(sys.argv[1])):
        if statement not in known:
            known[statement] = outcome(statement)
        found.setdefault(file, {})[statement] = known[statement]
    print(json.dumps(found))
