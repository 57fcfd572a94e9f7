"""Test runs of CloudAI, as far as they need nothing of it; tests/interop has the real one."""

import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.integrations.cloudai_point import Refused, judged, plan_of, prepare, refuse
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data
from cloudai_mbridge.verdict import Verdict
from tests.golden import Sentence

SYSTEM = SimpleNamespace(name="here", scheduler="standalone", global_env_vars={})
ARGS = {"model_recipe_name": "gpt_tiny", "compute_dtype": "fp32", "num_gpus": 1, "max_steps": 8}


class Dumped(SimpleNamespace):
    """What CloudAI's models are asked for."""

    def model_dump(self, include: Any = None, **_: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if include is None or name in include}


def run_of(output_path: Path, args: dict[str, Any] | None = None, **test: Any) -> Any:
    """Return a test run, with these arguments and keys of the test."""
    definition = Dumped(name="tiny", description="", cmd_args=Dumped(**ARGS, **(args or {})), **test)
    named: dict[str, Any] = {"name": "points", "nodes": [], "num_nodes": 1, "time_limit": None, "is_dse_job": False}
    return SimpleNamespace(test=definition, output_path=output_path, **named)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The output directory of a test run that has started."""
    (prepare(run_of(tmp_path), SYSTEM) / POINT_FILES.started).touch()
    return tmp_path


def point_of(root: Path) -> Path:
    return root / str(read_plan_data(root)["runs"][0]["key"])


@pytest.mark.process
@pytest.mark.parametrize("content", [None, b"", b"abc", b"\xff\n", b"0\n"])
def test_an_exit_code_that_says_nothing_is_judged(root: Path, content: bytes | None) -> None:
    """Nothing was logged, so that 0 does not make a success."""
    if content is not None:
        (point_of(root) / POINT_FILES.exit_code).write_bytes(content)
    assert judged(root).verdict is not Verdict.SUCCESS


@pytest.mark.process
@pytest.mark.parametrize("name", [ROOT_FILES.journal, ROOT_FILES.report, POINT_FILES.exit_code])
def test_a_file_that_cannot_be_used_is_bad_input(root: Path, name: str) -> None:
    path = (point_of(root) if name == POINT_FILES.exit_code else root) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(BadInput, match=r"exit_code\.txt" if name == POINT_FILES.exit_code else None):
        judged(root)


def test_a_journal_of_another_kind_is_bad_input(root: Path, sentence: Sentence) -> None:
    """It is a database with tables of the same name."""
    journal = root / ROOT_FILES.journal
    journal.unlink()
    with closing(sqlite3.connect(journal)) as db, db:
        db.executescript("CREATE TABLE runs (x TEXT); CREATE TABLE attempts (x TEXT);")
    with pytest.raises(BadInput) as caught:
        judged(root)
    sentence(caught)


def test_the_training_report_s_window_is_taken(tmp_path: Path, sentence: Sentence) -> None:
    report = {"exclude_start_steps": 6, "exclude_post_profiling_steps": 2}
    (run,) = plan_of(run_of(tmp_path, training_report=report), SYSTEM).runs
    assert run.warmup_steps == 6
    with pytest.raises(Refused, match="exclude_start_steps") as caught:
        plan_of(run_of(tmp_path, training_report={**report, "exclude_start_steps": 8}), SYSTEM)
    sentence(caught)


def test_what_cloudai_takes_for_one_point_is_one(tmp_path: Path, sentence: Sentence) -> None:
    """Such as a list of which env_params says that CloudAI draws one value."""
    with pytest.raises(Refused, match="points:") as caught:
        refuse(run_of(tmp_path, {"mb": [1, 2]}), SYSTEM)
    sentence(caught)
