"""Start scripts that use `small_run` on several ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]


@pytest.fixture
def launch(ranks: Callable[..., Any]) -> Launch:
    """Run the body of a script and return every rank's results: launch(2, '''def scenario(): return 1''')."""

    def run(processes: int, body: str) -> tuple[list[Any], str]:
        start = f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom small_run import *\n"
        done = ranks(processes, f"{start}{body}\nif __name__ == '__main__':\n    launch(scenario)\n")
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
        return json.loads(line.partition(" ")[2]), done.stdout

    return run
