"""Every command that takes a run's directory, on every kind of directory: a few lines, a code of its own, no trace."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloudai_mbridge import cli, pipeline
from cloudai_mbridge.runner import Journal
from tests.report.conftest import EMBEDDED, ARun, a_log

KEYS = ("t/mb1/0", "t/mb2/0")
MOST_LINES = 12
POLICY = 'name = "p"\n[history]\nfile = "history.sqlite"\nlast = 5\n'
COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("resume", "{}"),
    "cancel": ("cancel", "{}"),
    "status": ("status", "{}"),
    "logs": ("logs", "{}", "mb1"),
    "generate-report": ("generate-report", "--result-dir", "{}"),
    "gate": ("gate", "{}", "--policy", "{others}/policy.toml"),
    "compare": ("compare", "{}", "{}"),
    "promote": ("baseline", "promote", "{}", "--baseline", "{others}/b.toml", "--reason", "r", "--yes"),
    "import": ("history", "import", "{}", "--history", "{others}/history.sqlite"),
}
READERS = ("gate", "compare", "promote", "import")


# ---- directories


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two points that succeeded, with its reports."""
    run = ARun(tmp_path_factory.mktemp("module") / "run", EMBEDDED)
    assert tuple(run.keys) == KEYS
    with Journal.read_only(run.root / "journal.sqlite") as journal:
        assert set(journal.entries()) == set(KEYS)
    for key in run.keys:
        run.ended(key, a_log(6))
    journal_file = Journal(run.root / "journal.sqlite")
    for key in run.keys:
        journal_file.decided(key, "success", [])
    journal_file.close()
    (run.root / "driver.lock").write_text("process 17 on elsewhere\n")
    assert pipeline.report(run.root).succeeded
    return run.root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def change_plan(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        plan = json.loads((root / "plan.json").read_text())
        change(plan)
        (root / "plan.json").write_text(json.dumps(plan))
        (root / "report.json").unlink()

    return spoil


def first_run(**values: Any) -> Callable[[Path], None]:
    return change_plan(lambda plan: plan["runs"][0].update(values))


def sql(*statements: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        db = sqlite3.connect(root / "journal.sqlite", isolation_level=None)
        for statement in statements:
            db.execute(statement)
        db.close()
        (root / "report.json").unlink()

    return spoil


def file_of(name: str, data: bytes) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / name).write_bytes(data)
        (root / "report.json").unlink()

    return spoil


def a_dry_run(root: Path) -> None:
    change_plan(lambda plan: plan.update(dry_run=True))(root)
    for name in ("journal.sqlite", "driver.lock"):
        (root / name).unlink()


def an_old_dry_run(root: Path) -> None:
    """As it was before plans said so: the logs are looked for."""
    a_dry_run(root)
    plan = json.loads((root / "plan.json").read_text())
    del plan["dry_run"]
    (root / "plan.json").write_text(json.dumps(plan))


def journal_lost(root: Path) -> None:
    (root / "report.json").unlink()
    (root / "journal.sqlite").unlink()


def planned_only(root: Path) -> None:
    journal_lost(root)
    (root / "driver.lock").unlink()


def incomplete(root: Path) -> None:
    a_dry_run(root)
    (root / "plan.json").rename(root / "plan.json.new")


def emptied(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def a_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("no directory")


def a_circle_of_links(root: Path) -> None:
    shutil.rmtree(root)
    root.symlink_to(root)


def a_fifo_of_submissions(root: Path) -> None:
    (root / "submissions.jsonl").unlink(missing_ok=True)
    os.mkfifo(root / "submissions.jsonl")


def linked_away(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    (root / KEYS[0]).rename(elsewhere)
    (root / KEYS[0]).symlink_to(elsewhere)


def a_journal_that_is_a_directory(root: Path) -> None:
    planned_only(root)
    (root / "journal.sqlite").mkdir()


class Kind(NamedTuple):
    """spoil: makes it of a finished run. code: what every command ends with; codes: except these; None: not tried."""

    spoil: Callable[[Path], None]
    code: int
    said: str
    codes: dict[str, int | None] = {}


NO_REPORT: dict[str, int | None] = dict.fromkeys(READERS, 2)
AS_ALWAYS: dict[str, int | None] = dict.fromkeys(READERS)
MISSING: dict[str, int | None] = {"compare": 2}
KINDS = {
    "missing": Kind(shutil.rmtree, 2, "", MISSING),
    "empty": Kind(emptied, 2, "is not a run directory (plan.json is missing); give the directory that"),
    "a file": Kind(a_file, 2, ""),
    "a circle of links": Kind(a_circle_of_links, 2, "", MISSING),
    "a FIFO of submissions": Kind(
        a_fifo_of_submissions, 3, "a FIFO, not a regular file", dict.fromkeys(COMMANDS.keys() - {"resume", "cancel"})
    ),
    "incomplete": Kind(incomplete, 6, "is incomplete (plan.json is missing): mbridge ended before"),
    "dry run": Kind(a_dry_run, 6, "dry run", {"status": 0}),
    "dry run without mark": Kind(an_old_dry_run, 6, "dry run", {"status": 0, "logs": 0}),
    "planned only": Kind(
        planned_only, 6, "nothing was submitted", {"resume": None, "cancel": None, "status": 0, "logs": 0, **NO_REPORT}
    ),
    "journal lost": Kind(
        journal_lost, 7, "is missing although", {"resume": None, "cancel": None, "status": None, "logs": 0, **NO_REPORT}
    ),
    "newer plan": Kind(change_plan(lambda plan: plan.update(version=99)), 8, "use the mbridge that wrote it"),
    "older plan": Kind(change_plan(lambda plan: plan.update(version=1)), 8, "use the mbridge that wrote it"),
    "plan without version": Kind(change_plan(lambda plan: plan.pop("version")), 8, "use the mbridge that wrote it"),
    "plan cut": Kind(file_of("plan.json", b'{"version": 2, "runs": ['), 7, "restore the file"),
    "plan not UTF-8": Kind(file_of("plan.json", b'{"version": 2, "scenario": "\xff"}'), 7, "restore the file"),
    "plan deep": Kind(file_of("plan.json", b"[" * 200_000), 7, "restore the file"),
    "plan with long number": Kind(file_of("plan.json", b'{"version": ' + b"9" * 5000 + b"}"), 7, "restore the file"),
    "plan without runs": Kind(change_plan(lambda plan: plan.pop("runs")), 7, "runs"),
    "key twice in a table": Kind(file_of("plan.json", b'{"version": 2, "version": 2}'), 7, "appears twice"),
    "run twice": Kind(change_plan(lambda plan: plan["runs"].append(plan["runs"][0])), 7, "appears 2 times"),
    "num_nodes a text": Kind(first_run(num_nodes="two"), 7, "runs.0.num_nodes: 'two'"),
    "num_nodes 0": Kind(first_run(num_nodes=0), 7, "runs.0.num_nodes: 0"),
    "num_steps true": Kind(first_run(num_steps=True), 7, "runs.0.num_steps"),
    "args a list": Kind(first_run(args=[1]), 7, "runs.0.args"),
    "upstream a number": Kind(first_run(upstream=1), 7, "runs.0.upstream"),
    "label null": Kind(first_run(label=None), 7, "runs.0.label"),
    "label half a character": Kind(first_run(label="\ud800"), 7, "runs.0.label"),
    "notes a text": Kind(change_plan(lambda plan: plan.update(notes="abc")), 7, "notes: 'abc'"),
    "runner a list": Kind(change_plan(lambda plan: plan.update(runner=[])), 7, "runner: []"),
    "violations null": Kind(change_plan(lambda plan: plan["rejected"][0].update(violations=None)), 7, "violations"),
    "key absolute": Kind(first_run(key="/tmp/x/0"), 7, "runs.0.key: '/tmp/x/0' is not a path inside the directory"),
    "key goes up": Kind(first_run(key="a/../../x"), 7, "is not a path inside the directory"),
    "key with a zero": Kind(first_run(key="a/\0/0"), 7, "is not a path inside the directory"),
    "key empty": Kind(first_run(key=""), 7, "is not a path inside the directory"),
    "key too short": Kind(first_run(key="a"), 7, "is not the path of a run"),
    "key too long": Kind(first_run(key=f"a/{'b' * 300}/0"), 7, "has a name of more than 255 bytes"),
    "array goes up": Kind(first_run(array="arrays/../../x"), 7, "is not a path inside the directory"),
    "newer journal": Kind(sql("PRAGMA user_version = 99"), 8, "use the mbridge that wrote it", {**NO_REPORT}),
    "journal no database": Kind(file_of("journal.sqlite", b"x" * 5000), 7, "squeue --me", {**NO_REPORT}),
    "journal cut": Kind(
        lambda root: (os.truncate(root / "journal.sqlite", 5000), (root / "report.json").unlink())[-1],
        7,
        "journal.sqlite: is damaged",
        {**NO_REPORT},
    ),
    "journal a directory": Kind(a_journal_that_is_a_directory, 7, "is not a file", {**NO_REPORT}),
    "journal of others": Kind(
        sql(*(f"DROP TABLE {name}" for name in ("attempts", "runs", "nodes", "events", "facts")), "CREATE TABLE a (b)"),
        7,
        "is another program's database",
        {**NO_REPORT},
    ),
    "journal lacks a table": Kind(sql("DROP TABLE attempts"), 7, "the table 'attempts' is missing", {**NO_REPORT}),
    "journal lacks a column": Kind(sql("ALTER TABLE attempts DROP COLUMN ending"), 7, "no such column", {**NO_REPORT}),
    "linked away": Kind(linked_away, 7, "is a link or a file", {"status": 0, "logs": 0, **AS_ALWAYS}),
}


def contents(root: Path) -> dict[str, Any]:
    """Return the names of a directory tree with what the files hold, and where links lead."""
    if root.is_file():
        return {"": root.read_bytes()}
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else path.is_symlink() and os.readlink(path)
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A directory for what the commands need, and may write, beside the run."""
    directory = tmp_path / "others"
    directory.mkdir()
    (directory / "policy.toml").write_text(POLICY)
    return directory


@pytest.fixture
def mbridge_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: Path) -> Any:
    """Run a command in this process: mbridge_here("status", root) returns the exit code and what was printed."""

    def run(command: str, root: Path) -> tuple[int, str]:
        argv = [word.replace("{}", str(root)).replace("{others}", str(others)) for word in COMMANDS[command]]
        monkeypatch.setattr(sys, "argv", ["mbridge", *argv])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out + captured.err

    return run


EVERY_COMMAND = ("plan cut", "newer journal", "journal cut")  # one for each file that all commands read


def commands_of(name: str) -> Iterator[tuple[str, int]]:
    """Yield a command for each exit code of a kind of directory, in turn over the kinds, with the code."""
    kind, place = KINDS[name], list(KINDS).index(name)
    codes = {command: kind.codes.get(command, kind.code) for command in COMMANDS}
    for code in dict.fromkeys(code for code in codes.values() if code is not None):
        commands = [command for command in COMMANDS if codes[command] == code]
        for command in commands if name in EVERY_COMMAND else [commands[place % len(commands)]]:
            yield command, code


@pytest.mark.parametrize("name", KINDS)
def test_a_refusal_is_a_few_lines_and_writes_nothing(name: str, root: Path, mbridge_here: Any) -> None:
    kind = KINDS[name]
    kind.spoil(root)
    before, beside = contents(root), sorted(root.parent.glob("*"))
    for command, expected in commands_of(name):
        code, said = mbridge_here(command, root)
        assert code == expected, (command, said)
        assert "Traceback" not in said
        if code == kind.code:
            assert kind.said in said
            assert all(len(line) < 700 for line in said.splitlines())
            assert len(said.splitlines()) == 1, (command, said)
        elif command != "logs":
            assert len(said.splitlines()) <= MOST_LINES, (command, said)
        assert contents(root) == before, command
        assert sorted(root.parent.glob("*")) == beside, command


def test_the_status_of_a_run_whose_journal_is_lost(root: Path, mbridge_here: Any) -> None:
    journal_lost(root)
    before = contents(root)
    code, said = mbridge_here("status", root)
    assert code == 7
    assert "journal.sqlite: is missing although mbridge has started this run" in said
    assert contents(root) == before


# ---- driven by another process


@pytest.fixture
def driven(root: Path) -> Iterator[Path]:
    with (root / "driver.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield root


def test_while_another_process_drives(driven: Path, mbridge_here: Any) -> None:
    before = contents(driven)
    for command in [name for name in COMMANDS if name != "cancel"]:
        code, said = mbridge_here(command, driven)
        assert code == {"status": 0, "logs": 0, "generate-report": 4}.get(command, 5), (command, said)
        if command != "logs":
            assert "held by process 17 on elsewhere" in said, command
        if code == 5:
            assert said.count("\n") == 1, command
        assert "mbridge cancel" not in said, command
        assert contents(driven) == before, command


# ---- read-only


def bound_by_modes(*argv: str) -> "subprocess.CompletedProcess[str]":
    """Run mbridge as a user whom the modes of files bind: root too, without the capability to ignore them."""
    words = [sys.executable, "-m", "cloudai_mbridge", *argv]
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *words]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=1500)


@pytest.fixture
def read_only(finished: Path, tmp_path: Path) -> Iterator[Path]:
    root = Path(shutil.copytree(finished, tmp_path / "run"))
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield root
    for path in paths:
        path.chmod(0o755)


@pytest.mark.parametrize("command", ["resume", "status", "generate-report"])
def test_a_read_only_directory(command: str, read_only: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may write everything, and setpriv (util-linux) is not there")
    before = contents(read_only)
    done = bound_by_modes(*(word.replace("{}", str(read_only)) for word in COMMANDS[command]))
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert contents(read_only) == before
    if command == "status":
        assert done.returncode == 0, said
    else:
        assert done.returncode == 3, said
        assert said.count("\n") == 1
        assert "is read-only for this user; make it writable" in said


def test_the_journal_of_a_driver_that_was_killed_is_read_without_a_trace(root: Path, mbridge_here: Any) -> None:
    """Its write-ahead log is still there, and holds what the file does not."""
    copy = root.parent / "copy"
    journal = Journal(root / "journal.sqlite")
    journal.exclude("n7", "known by the log only")
    shutil.copytree(root, copy)
    journal.close()
    assert (copy / "journal.sqlite-wal").stat().st_size
    before = contents(copy)
    code, said = mbridge_here("status", copy)
    assert code == 0
    assert "node n7 is excluded: known by the log only" in said
    assert contents(copy) == before


# ---- rows that are damaged: the others go on


ROWS = {
    "unknown field": "UPDATE attempts SET status = json_set(status, '$.colour', 1) WHERE key = 't/mb1/0'",
    "unknown class": "UPDATE attempts SET status = json_set(status, '$.job_class', 'x') WHERE key = 't/mb1/0'",
    "no JSON": "UPDATE attempts SET status = '{' WHERE key = 't/mb1/0'",
    "no table": "UPDATE attempts SET status = '[]' WHERE key = 't/mb1/0'",
    "wrong type": "UPDATE attempts SET status = json_set(status, '$.exit_code', 'x') WHERE key = 't/mb1/0'",
    "no duration": "UPDATE attempts SET status = json_set(status, '$.run_time_s', -1) WHERE key = 't/mb1/0'",
    "not UTF-8": "UPDATE attempts SET status = CAST(x'ff' AS TEXT) WHERE key = 't/mb1/0'",
    "deep": f"UPDATE attempts SET status = '{'[' * 100_000}' WHERE key = 't/mb1/0'",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_damaged_row_costs_its_own_run_only(row: str, root: Path, mbridge_here: Any) -> None:
    sql(ROWS[row])(root)
    before = contents(root)
    code, said = mbridge_here("status", root)
    assert code == 7
    assert "t/mb1/0: attempt 1: status: " in said
    assert len(said.splitlines()) <= MOST_LINES
    assert contents(root) == before

    code, said = mbridge_here("generate-report", root)
    assert code == 1
    points = {point["key"]: point for point in json.loads((root / "report.json").read_text())["points"]}
    assert [points[key]["verdict"] for key in KEYS] == ["failed", "success"]
    assert "does not say how the job ended" in str(points[KEYS[0]]["reasons"])

    code, said = mbridge_here("resume", root)
    assert code == 1, said
    assert "Traceback" not in said
    with Journal.read_only(root / "journal.sqlite") as journal:
        assert [len(entry.attempts) for entry in journal.entries().values()] == [1, 1], "nothing is submitted again"


@pytest.mark.parametrize("change", ["verdict = 'wonderful'", "reasons = '{'", "reasons = '[1]'"])
def test_a_damaged_verdict_is_found_again(change: str, root: Path, mbridge_here: Any) -> None:
    sql(f"UPDATE runs SET {change} WHERE key = 't/mb1/0'")(root)
    code, said = mbridge_here("status", root)
    assert code == 7
    assert f"t/mb1/0: {change.split()[0]}: " in said
    code, said = mbridge_here("resume", root)
    assert code == 0, said
    with Journal.read_only(root / "journal.sqlite") as journal:
        assert [len(entry.attempts) for entry in journal.entries().values()] == [1, 1]


def test_a_journal_of_before_there_were_versions_is_read(root: Path, mbridge_here: Any) -> None:
    sql("PRAGMA user_version = 0", "PRAGMA application_id = 0")(root)
    assert mbridge_here("status", root)[0] == 0
    assert mbridge_here("resume", root)[0] == 0


@pytest.mark.parametrize("name", ["s_2026-01-02_03-04-05", "a_b_2026-01-02_03-04-05_7"])
def test_a_run_that_ended_before_it_had_written_anything(name: str, tmp_path: Path, mbridge_here: Any) -> None:
    (tmp_path / name).mkdir()
    code, said = mbridge_here("status", tmp_path / name)
    assert code == 6
    assert "submitted nothing; run the scenario again" in said


def test_a_directory_of_configurations_is_not_called_a_run(tmp_path: Path, mbridge_here: Any) -> None:
    (tmp_path / "system.toml").write_text('name = "l"\nscheduler = "local"\n')
    code, said = mbridge_here("status", tmp_path)
    assert code == 2
    assert "is not a run directory" in said


# ---- dry runs among results


@pytest.mark.parametrize(("command", "code"), [("gate", 11), ("promote", 15), ("import", 0)])
def test_dry_runs_among_results_are_named_and_skipped(
    command: str, code: int, root: Path, mbridge_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = Path(shutil.copytree(root, root.parent / "dry"))
    a_dry_run(dry)
    assert mbridge_here("import", root)[0] == 0
    words = list(COMMANDS[command])
    words.insert(words.index("{}"), str(dry))
    monkeypatch.setitem(COMMANDS, command, tuple(words))
    found, said = mbridge_here(command, root)
    assert found == code, said
    assert f"{dry}: skipped, it is a dry run" in said.replace("\n", "")


TEST = """
name = "n"
description = "d"
[cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
num_gpus = 2
"""


def test_what_dry_run_writes_is_marked(
    mbridge_here: Any, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (others / "tests").mkdir()
    (others / "tests" / "n.toml").write_text(TEST)
    (others / "scenario.toml").write_text('name = "s"\n[[Tests]]\nid = "a"\ntest_name = "n"\n')
    (others / "system.toml").write_text('name = "l"\nscheduler = "local"\n')
    files = [f"--system-config={others}/system.toml", f"--test-scenario={others}/scenario.toml"]
    files += [f"--tests-dir={others}/tests", f"--output-dir={others}/out"]
    monkeypatch.setitem(COMMANDS, "dry-run", ("dry-run", *files))
    assert mbridge_here("dry-run", tmp_path)[0] == 0
    (root,) = (others / "out").iterdir()
    before = contents(root)
    code, said = mbridge_here("status", root)
    assert code == 0
    assert "1 waiting; a dry run: nothing was submitted; start its scenario with: mbridge run" in said
    code, said = mbridge_here("resume", root)
    assert (code, said) == (
        6,
        f"error: {root}: is a dry run, so nothing was submitted; start its scenario with `mbridge run`\n",
    )
    assert contents(root) == before


# ---- nothing is written outside


def test_a_link_in_the_place_of_a_report_is_replaced_and_not_followed(root: Path, mbridge_here: Any) -> None:
    outside = root.parent / "outside"
    outside.write_text("mine")
    for name in ("report.json", "report.html", "steps.csv", "junit.xml", f"{KEYS[0]}/report.txt"):
        (root / name).unlink()
        (root / name).symlink_to(outside)
    assert mbridge_here("generate-report", root)[0] == 0
    assert outside.read_text() == "mine"
    assert not (root / "report.json").is_symlink()


def test_a_link_in_the_place_of_a_lock_is_not_followed(root: Path, mbridge_here: Any) -> None:
    outside = root.parent / "outside"
    outside.write_text("mine")
    (root / "driver.lock").unlink()
    (root / "driver.lock").symlink_to(outside)
    for command in ("status", "resume", "generate-report", "gate"):
        code, said = mbridge_here(command, root)
        assert code == 3, (command, said)
        assert said.count("\n") == 1
        assert "driver.lock" in said
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("spoil", ["", "no database"])
def test_a_report_whose_history_cannot_be_read_is_not_begun(
    spoil: str, root: Path, others: Path, mbridge_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil:
        (others / "history.sqlite").write_text(spoil)
    words = (*COMMANDS["generate-report"], "--history", "{others}/history.sqlite")
    monkeypatch.setitem(COMMANDS, "generate-report", words)
    before = contents(root)
    code, said = mbridge_here("generate-report", root)
    assert code == 2
    assert said.count("\n") == 1
    assert contents(root) == before
