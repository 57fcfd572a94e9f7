"""A history that cannot be read, or whose SQL is not mbridge's, is refused in one line."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cloudai_mbridge import cli
from cloudai_mbridge.errors import Damaged, MBridgeError
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.trend import history_rows
from tests.gate.history_data import make_point, write_report
from tests.golden import Sentence

DEEP = "[" * 60 + "]" * 60


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of four runs, the last of which failed."""
    directory = tmp_path_factory.mktemp("original")
    points = [make_point(number=i, verdict="failed" if i == 3 else "success") for i in range(4)]
    with History(directory / "history.sqlite") as store:
        store.import_report(write_report(directory / "report.json", points))
    return directory / "history.sqlite"


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copy(original, tmp_path))


def tamper(file: Path, *statements: str) -> None:
    """Change a history as somebody would who does not want it seen: the triggers are there again afterwards."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement)
        for _, sql in triggers:
            with contextlib.suppress(sqlite3.OperationalError):  # its table is not there any more
                db.execute(sql)


def read_all(file: Path, tmp_path: Path) -> list[MBridgeError]:
    """Do all that reads a history, and return what was raised."""
    report = json.loads(write_report(tmp_path / "new.json", [make_point(number=9)]).read_text())
    key = report["points"][0]["comparability"]["id"]
    work: list[Callable[[History], object]] = [
        lambda store: store.points(),
        lambda store: store.keys(),
        lambda store: store.runs(),
        lambda store: store.runs(run_id_prefix=""),
        lambda store: store.series(key, "step_time_s", 9),
        lambda store: store.series(key, "loss_curve", 9),
        lambda store: store.series(key, "tflops_per_gpu", 9),
        lambda store: store.reference(key, 9),
        lambda store: store.reference_for("t/tp=1", 9),
        lambda store: store.points_expected("nightly", "cluster"),
        lambda store: history_rows(store, report),
        lambda store: store.import_report(tmp_path / "new.json"),
    ]
    errors = []
    for each in work:
        try:
            with History(file) as store:
                each(store)
        except MBridgeError as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE metrics SET value = 'x' WHERE name = 'step_time_s'", "'x' is not a step_time_s"),
        ("UPDATE metrics SET value = 7 WHERE name = 'step_time_s'", "7 is not a step_time_s"),
        ("UPDATE metrics SET value = x'00ff' WHERE name = 'step_time_s'", r"b'\x00\xff' is not a step_time_s"),
        ("UPDATE metrics SET value = 0.0 WHERE name = 'step_time_s'", "0.0 is not a step_time_s"),
        ("UPDATE metrics SET value = '[1.0,NaN]' WHERE name = 'loss_curve'", "'[1.0,NaN]' is not a loss_curve"),
        ("UPDATE metrics SET value = '5' WHERE name = 'loss_curve'", "'5' is not a loss_curve"),
        ("UPDATE runs SET nodes = 'x'", "'x' is not a list of texts"),
        ("UPDATE runs SET nodes = '[5]'", "'[5]' is not a list of texts"),
        ("UPDATE runs SET environment = 99", "there is no environment 99"),
        ("UPDATE environments SET fields = '[]'", "'[]' is not a table"),
        (f"UPDATE environments SET fields = '{'[' * 100_000}'", "is not a table"),
        ("UPDATE keys SET fields = '[1]'", "'[1]' is not a table"),
        ("DELETE FROM keys", "there is no key"),
        ("UPDATE runs SET point = CAST(x'ff' AS TEXT)", "is damaged (Could not decode to UTF-8"),
        ("DROP TABLE metrics", "the table 'metrics' is not one that mbridge made"),
        ("ALTER TABLE runs DROP COLUMN num_steps", "the table 'runs' is not one that mbridge made"),
        ("CREATE TRIGGER x AFTER INSERT ON runs BEGIN SELECT 1; END", "the trigger 'x' is not one that mbridge made"),
    ],
)
def test_what_cannot_be_read_is_damage(file: Path, tmp_path: Path, statement: str, named: str) -> None:
    tamper(file, statement)
    errors = read_all(file, tmp_path)
    assert errors
    for error in errors:
        assert isinstance(error, Damaged), error
        assert str(error).startswith(f"{file}: is damaged (")
        assert "\n" not in str(error)
    assert any(named in str(error) for error in errors), [str(error) for error in errors]


@pytest.mark.parametrize(
    "words", ["gate new.json --policy policy.toml", "history list", "history trend", "history show t/tp=1"]
)
def test_every_command_says_it_in_one_line_and_exits_with_7(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sentence: Sentence,
    words: str,
) -> None:
    tamper(file, "UPDATE metrics SET value = 'x' WHERE name = 'step_time_s'")
    write_report(tmp_path / "new.json", [make_point(number=9)])
    (tmp_path / "policy.toml").write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MBRIDGE_HISTORY", str(file))
    monkeypatch.setattr("sys.argv", ["mbridge", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 7
    sentence(line)


def test_a_damaged_definition_of_a_table_is_one_line(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"CREATE TABLE runs (\n", b"CREATE TABLE runs (`"))
    errors = read_all(file, tmp_path)
    assert errors
    for error in errors:
        assert isinstance(error, Damaged)
        assert "malformed database schema" in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 600


def test_a_view_that_never_ends_is_not_read(file: Path, tmp_path: Path, sentence: Sentence) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT runs.* FROM runs, n"
    tamper(file, "DROP VIEW judged", f"CREATE VIEW judged AS {endless}")
    sentence(read_all(file, tmp_path)[0])


def test_a_history_without_its_triggers_or_with_own_tables_is_read(file: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            db.execute(f"DROP TRIGGER {name}")
        db.execute("CREATE TABLE notes (x)")
        db.execute("CREATE VIEW mine AS SELECT * FROM runs")
        db.execute("ANALYZE")
    assert read_all(file, tmp_path) == []


def test_what_cannot_be_read_back_is_not_taken(tmp_path: Path, sentence: Sentence) -> None:
    report = write_report(tmp_path / "deep.json", [make_point(environment={"packages": json.loads(DEEP)})])
    with History(tmp_path / "h.sqlite") as store, pytest.raises(MBridgeError) as caught:
        store.import_report(report)
    sentence(caught)
