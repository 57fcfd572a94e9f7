"""`mbridge rule`, and the messages that name it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cloudai_mbridge.cli import cli
from cloudai_mbridge.constraints.rule_docs import details_hint
from cloudai_mbridge.constraints.upstream import LIFTS
from cloudai_mbridge.errors import BadInput
from tests.golden import Sentence

REPOSITORY = Path(__file__).parents[2]
OF_TINY_SWEEP = (
    *("--system-config", f"{REPOSITORY}/systems/local.toml", "--tests-dir", f"{REPOSITORY}/test_defs"),
    *("--test-scenario", f"{REPOSITORY}/conf/scenarios/gpt_tiny_sweep.toml"),
)
HINT = "details: mbridge rule C01 C03 C04"


def test_a_rule_is_explained_with_examples_source_and_releases() -> None:
    shown = CliRunner().invoke(cli, ["rule", "c11"]).output
    parts = ("C11  Overlapped", "passes ", 'fails          moe_a2a_overlap=true, cuda_graph_impl="local"', "source ")
    assert all(part in shown for part in parts)
    assert all(f"{lift.since}: {lift.reason}" in shown for lift in LIFTS["C11"])


def test_an_unknown_rule_gets_a_suggestion(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"C66") as caught:
        CliRunner().invoke(cli, ["rule", "C66"], catch_exceptions=False)
    sentence(caught)


@pytest.mark.process  # git
@pytest.mark.parametrize(
    "command",
    [
        ("dry-run", "--output-dir", "out"),
        ("dry-run", "--output-dir", "out", "--rejected"),
        ("sweep", "plan"),
        ("sweep", "explain", "sweep", "tp=2,pp=2,mb=3"),
    ],
)
def test_rejections_name_the_command_once(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb = command[: 1 + (command[0] == "sweep")]
    result = CliRunner().invoke(cli, [*verb, *OF_TINY_SWEEP, *command[len(verb) :]], catch_exceptions=False)
    assert result.output.count("details: mbridge rule") == 1
    assert HINT in result.output


def test_a_limit_on_memory_is_no_rule(sentence: Sentence) -> None:
    assert details_hint(["MEMORY"]) == ""
    sentence(details_hint(["MEMORY", "C04"]))
