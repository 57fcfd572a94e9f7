"""`--json`: each command prints one document, which the documented schema of the command accepts; errors too."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.console import render_json, wants_json
from cloudai_mbridge.commands.setup.schema import DOCUMENTS, document_schema
from tests.commands.conftest import Run, a_run, change_plan, dry, finish, name_of
from tests.e2e.test_calibrate_command import SCENARIO, write_table
from tests.gate.history_data import make_point, write_report
from tests.golden import GoldenFile, Sentence

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]
SCHEMAS = {command: REPOSITORY / f"docs/schemas/json/{command.replace(' ', '-')}.json" for command in DOCUMENTS}
DONE, FAILED, DRY, OTHER = map(name_of, (1, 2, 3, 4))
TINY = (
    *("--system-config", f"{REPOSITORY}/systems/local.toml", "--tests-dir", f"{REPOSITORY}/test_defs"),
    *("--test-scenario", f"{REPOSITORY}/conf/scenarios/gpt_tiny_sweep.toml"),
)
POLICY = 'name = "p"\nbaseline = "{}.toml"\n'
PROMOTE = ("baseline", "promote", "--baseline", "new.toml", "--reason", "a test", "--by", "ada", "--json")
CONFIGURATIONS = ("verify-configs", f"{REPOSITORY}/conf", "--tests-dir", f"{REPOSITORY}/test_defs", "--json")
RANKED = ("tune", "--recipe=llama3_8b", "--gpu=h100", "--num-gpus=8", "--top=2", "--json")

# Commands that succeed, or end with another code than 0 and a document all the same
GOOD: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("list", 0, ("list", "--json")),
    ("list", 0, ("list", "reports", "--json")),
    ("rule", 0, ("rule", "C06", "c11", "--json")),
    ("verify-configs", 0, CONFIGURATIONS),
    ("verify-configs", 2, ("verify-configs", f"{REPOSITORY}/conf", "--json")),
    ("dry-run", 0, ("dry-run", *TINY, "--output-dir", "out", "--json")),
    ("rehearse", 1, ("rehearse", *TINY, "--json")),
    ("sweep plan", 0, ("sweep", "plan", *TINY, "--json")),
    ("sweep plan", 0, ("sweep", "plan", "--system-config=h100.toml", "--test-scenario=layouts.toml", "--json")),
    ("sweep explain", 0, ("sweep", "explain", *TINY, "sweep", "tp1-pp1-mb1", "--json")),
    ("sweep explain", 1, ("sweep", "explain", *TINY, "sweep", "tp=2,pp=1,mb=3", "--json")),
    ("estimate", 0, ("estimate", "--recipe=llama3_70b", "--gpu=gb200", "--num-gpus=64", "--tp=2", "--pp=4", "--json")),
    ("estimate", 0, ("estimate", "--recipe=llama3_8b", "--memory-estimator=megatron-bridge/seed", "--json")),
    ("estimate", 9, ("estimate", "--recipe=llama3_70b", "--gpu=h100", "--num-gpus=8", "--release=none", "--json")),
    ("tune", 0, RANKED),
    ("tune", 0, (*RANKED, "--write", "1", "best.toml", "--system-config=h100.toml")),
    ("calibrate", 0, ("calibrate", "measured.csv", "--json", "--output", "factors.toml")),
    ("status", 0, ("status", DONE, "--events", "--json")),
    ("status", 0, ("status", DRY, "--json")),
    ("logs", 0, ("logs", FAILED, "--json")),
    ("runs", 0, ("runs", "--json")),
    ("show", 0, ("show", DONE, "--json")),
    ("show", 0, ("show", FAILED, "mb2", "--json")),
    ("generate-report", 1, ("generate-report", "--result-dir", FAILED, "--json")),
    ("gate", 0, ("gate", "same.json", "--policy=policy.toml", "--json")),
    ("gate", 10, ("gate", "--json=-", "slow.json", "--policy=policy.toml", "--markdown=gate.md")),
    ("gate", 13, ("gate", "few.json", "--policy=policy.toml", "--confirm=2", "--json")),
    ("compare", 0, ("compare", "good.json", "slow.json", "--json")),
    ("baseline promote", 0, (*PROMOTE, "good.json", "--dry-run")),
    ("baseline promote", 0, (*PROMOTE, "good.json", "--yes")),
    ("baseline show", 0, ("baseline", "show", "baseline.toml", "--json")),
    ("baseline check", 0, ("baseline", "check", "baseline.toml", "--json")),
    ("history import", 0, ("history", "import", "same.json", "--history=other.sqlite", "--json")),
    ("history list", 0, ("history", "list", "--history=history.sqlite", "--json")),
    ("history show", 0, ("history", "show", "t/tp=1", "--history=history.sqlite", "--json")),
    ("history trend", 0, ("history", "trend", "--history=history.sqlite", "--json")),
    ("nodes show", 0, ("nodes", "show", "good.json", "slow.json", "--json")),
)
BAD: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("list", "BadInput", 2, ("list", "gpus", "--json")),
    ("rule", "BadInput", 2, ("rule", "C66", "--json")),
    ("verify-configs", "BadInput", 2, ("verify-configs", "empty", "--json")),
    ("dry-run", "BadInput", 2, ("dry-run", "--json")),
    ("rehearse", "BadInput", 2, ("rehearse", *TINY, "--on-slurm", "--json")),
    ("sweep plan", "BadInput", 2, ("sweep", "plan", *TINY, "--format=csv", "--json")),
    ("sweep explain", "BadInput", 2, ("sweep", "explain", *TINY, "sweep", "tp9", "--json")),
    ("estimate", "BadInput", 2, ("estimate", "--recipe=none", "--json")),
    ("estimate", "NothingFits", 9, ("estimate", "--recipe=llama3_70b", "--gpu=h100", "--num-gpus=8", "--json")),
    ("tune", "BadInput", 2, (*RANKED, "--write", "1", "measured.csv")),
    ("calibrate", "BadInput", 2, ("calibrate", "measured.csv", "--json", "--output", "measured.csv")),
    ("status", "OtherVersion", 8, ("status", OTHER, "--json")),
    ("logs", "NothingRan", 6, ("logs", DRY, "--json")),
    ("logs", "BadInput", 2, ("logs", DONE, "mb1", "--json")),
    ("runs", "BadInput", 2, ("runs", "--output-dir=nowhere", "--json")),
    ("show", "BadInput", 2, ("show", DONE, "mb9", "--json")),
    ("generate-report", "NothingRan", 6, ("generate-report", "--json", "--result-dir", DRY)),
    ("gate", "BadInput", 2, ("gate", "good.json", "--policy=missing.toml", "--json")),
    ("gate", "NonePromoted", 17, ("gate", "good.json", "--policy=first.toml", "--json")),
    ("compare", "BadInput", 2, ("compare", "good.json", "nowhere.json", "--json=-")),
    ("baseline promote", "BadInput", 2, (*PROMOTE, "good.json")),
    ("baseline promote", "PromotionRefused", 15, (*PROMOTE, "few.json", "--yes")),
    ("baseline show", "BadInput", 2, ("baseline", "show", "policy.toml", "--json")),
    ("baseline check", "BadInput", 2, ("baseline", "check", "nowhere.toml", "--json")),
    ("history import", "BadInput", 2, ("history", "import", "nowhere.json", "--history=new.sqlite", "--json")),
    ("history list", "BadInput", 2, ("history", "list", "--history=measured.csv", "--json")),
    ("history show", "BadInput", 2, ("history", "show", "none", "--history=history.sqlite", "--json")),
    ("history trend", "BadInput", 2, ("history", "trend", "none", "--history=history.sqlite", "--json")),
    ("nodes show", "BadInput", 2, ("nodes", "show", "nowhere.json", "--json")),
)


def reports(place: Path) -> None:
    noise = np.random.default_rng(1)
    kinds = (("good", 1.0, 5), ("same", 1.0, 5), ("slow", 1.2, 5), ("few", 1.0, 1))
    for first, (name, level, count) in enumerate(kinds):
        times = [level * math.exp(noise.normal(0, 0.002)) for _ in range(count)]
        points = [make_point(time, number=10 * first + number) for number, time in enumerate(times)]
        write_report(place / f"{name}.json", points)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in some states, reports, a baseline, a history, and what else the commands read."""
    place = tmp_path_factory.mktemp("place")
    finish(a_run(place / "results", DONE))
    finish(a_run(place / "results", FAILED), good=1)
    dry(a_run(place / "results", DRY))
    change_plan(a_run(place / "results", OTHER), version=99)
    (place / "empty").mkdir()
    reports(place)
    write_table(place / "measured.csv", 1.5)
    for policy, baseline in (("policy", "baseline"), ("missing", "none"), ("first", "waiting")):
        (place / f"{policy}.toml").write_text(POLICY.format(baseline))
    (place / "waiting.toml").write_text(f"version = 1\nnone_until = {datetime.now(UTC).date()}\n")
    (place / "h100.toml").write_text('name = "c"\nscheduler = "local"\ngpu_type = "h100"\n')
    (place / "layouts.toml").write_text(SCENARIO)
    promote = ("baseline", "promote", "good.json", "--baseline", "baseline.toml", "--reason", "a test", "--yes")
    for command in (promote, ("history", "import", "good.json", "slow.json", "--history", "history.sqlite")):
        words = [str(place / word) if word.endswith(("json", "toml", "sqlite")) else word for word in command]
        assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 0
    return place


@pytest.fixture
def mbridge_there(mbridge_here: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(place)
    return mbridge_here


def check(command: str, text: str) -> dict[str, Any]:
    """Return the one document that was printed, if its schema accepts it."""
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    jsonschema.validate(document, json.loads(SCHEMAS[command].read_text()), jsonschema.Draft202012Validator)
    assert isinstance(document, dict)
    return document


def having_json(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the commands that have --json."""
    for name in group.list_commands(click.Context(group)):
        command, path = group.get_command(click.Context(group), name), (*names, name)
        if isinstance(command, click.Group):
            yield from having_json(command, path)
        elif command and any("--json" in parameter.opts for parameter in command.params):
            yield " ".join(path)


WITH_JSON = list(having_json(cli))


def test_every_command_with_json_has_a_schema_and_is_tested() -> None:
    assert sorted(WITH_JSON) == sorted(DOCUMENTS) == sorted({command for command, *_ in BAD})
    assert {command for command, *_ in GOOD} == {*DOCUMENTS}
    page = (REPOSITORY / "docs/scripting.md").read_text()
    assert not [command for command in WITH_JSON if f"| `mbridge {command}" not in page]
    assert {path.name for path in SCHEMAS[WITH_JSON[0]].parent.iterdir()} == {path.name for path in SCHEMAS.values()}


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_documented_schema_is_what_the_command_prints(golden_file: GoldenFile, command: str) -> None:
    kind = f"json:{command.replace(' ', '-')}"
    printed = CliRunner().invoke(cli, ["schema", kind]).output
    golden_file(SCHEMAS[command], printed)
    jsonschema.Draft202012Validator.check_schema(document_schema(kind))


@pytest.mark.parametrize(("command", "code", "argv"), GOOD, ids=[" ".join(argv)[:80] for *_, argv in GOOD])
def test_one_document(command: str, code: int, argv: tuple[str, ...], mbridge_there: Run) -> None:
    ended, out, err = mbridge_there(*argv)
    assert ended == code, err
    assert "error" not in check(command, out)


@pytest.mark.parametrize(("command", "kind", "code", "argv"), BAD, ids=[" ".join(argv)[:80] for *_, argv in BAD])
def test_an_error_is_a_document(command: str, kind: str, code: int, argv: tuple[str, ...], mbridge_there: Run) -> None:
    ended, out, err = mbridge_there(*argv)
    error = check(command, out)["error"]
    assert (ended, error["exit_code"], error["kind"]) == (code, code, kind)
    assert error["messages"]
    assert all(message in err for message in error["messages"])


@pytest.mark.parametrize("command", [command for command in WITH_JSON if "--" not in command])
def test_a_wrong_option_is_a_document(command: str, mbridge_there: Run) -> None:
    code, out, err = mbridge_there(*command.split(), "--json", "--no-such-option")
    assert (code, err) == (2, "error: No such option '--no-such-option'.\n")
    assert check(command, out)["error"]["messages"] == ["No such option '--no-such-option'."]


def test_a_bug_is_a_document(mbridge_there: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudai_mbridge.commands.run.status.find_runs", lambda directory: 1 // 0)
    code, out, err = mbridge_there("runs", "--json")
    assert (code, check("runs", out)["error"]["kind"]) == (3, "ToolFailure")
    assert "ZeroDivisionError" in err


def test_documents_say_what_the_text_says(mbridge_there: Run) -> None:
    status = json.loads(mbridge_there("status", FAILED, "--json")[1])
    assert (status["counts"], [run["key"] for run in status["runs"]]) == (
        {"success": 1, "failed": 1},
        ["t/mb1/0", "t/mb2/0"],
    )
    gate = json.loads(mbridge_there("gate", "slow.json", "--policy=policy.toml", "--json")[1])
    assert (gate["verdict"], gate["exit_code"]) == ("regression", 10)
    plan = json.loads(mbridge_there("sweep", "plan", *TINY, "--json", "--show=1")[1])["tests"][0]
    assert (plan["points"], plan["accepted"], plan["rejected"], plan["rules"]["C04"]) == (12, 6, 6, 6)
    assert [point["label"] for point in plan["examples"]] == ["tp1-pp1-mb1"]
    (trend,) = json.loads(mbridge_there("history", "trend", "--history=history.sqlite", "--json")[1])["trends"]
    assert [change["effect"] for change in trend["changes"]] == ["worse"]


def test_a_gate_writes_to_a_file_what_it_would_print(mbridge_there: Run, place: Path) -> None:
    argv = ("gate", "same.json", "--policy=policy.toml")
    code, out, _ = mbridge_there(*argv, "--json", "gate.json")
    assert (code, out.splitlines()[-1]) == (0, "exit code 0")
    assert check("gate", (place / "gate.json").read_text()) == check("gate", mbridge_there(*argv, "--json")[1])
    code, out, err = mbridge_there("gate", "nowhere.json", "--policy=policy.toml", "--json", "other.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_the_file_of_a_gate_is_not_a_report(mbridge_there: Run, place: Path, sentence: Sentence) -> None:
    report = place / "results" / DONE / "report.json"
    before = report.read_bytes()
    code, out, err = mbridge_there("gate", "good.json", "--json", str(report), "--policy=policy.toml")
    assert (code, out) == (2, "")
    sentence(err)
    assert report.read_bytes() == before


@dataclass(frozen=True)
class Odd:
    number: float
    path: Path
    more: dict[str, Any]


def test_what_json_lacks() -> None:
    text = render_json(Odd(math.nan, Path("a\udc80"), {"b": [math.inf, -math.inf, 1.5]}))
    assert json.loads(text) == {"number": None, "path": "a\\udc80", "more": {"b": [None, None, 1.5]}}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("runs --json", True),
        ("--log-level INFO show --json RUN", True),
        ("show RUN -- --json", False),
        ("gate RUN --policy p --json", True),
        ("gate RUN --json --policy p", True),
        ("gate RUN --json=- --policy p", True),
        ("gate RUN --json - --policy p", True),
        ("gate RUN --json file --policy p", False),
        ("gate RUN --json=file --policy p", False),
        ("compare A B", False),
    ],
)
def test_who_asks_for_json(argv: str, expected: bool) -> None:
    assert wants_json(argv.split()) is expected
