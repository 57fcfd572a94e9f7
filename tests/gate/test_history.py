"""The history takes every run once, loses none, changes none, and refuses what is not its own."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, Damaged, ToolFailure
from cloudai_mbridge.gate import history_file
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.runs import read_report, read_results
from tests.cases import every
from tests.gate.history_data import ENVIRONMENT, make_point, write_report
from tests.golden import Sentence

WRITER = Path(__file__).parent / "history_writer.py"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "results" / "history.sqlite") as opened:
        yield opened


def the_key(store: History) -> str:
    (key,) = store.keys()
    return key


def test_import_takes_final_runs_and_counts_the_rest(store: History, tmp_path: Path) -> None:
    points = [
        make_point(number=0),
        make_point(number=1, verdict="failed"),
        make_point(number=2, verdict="skipped"),
        make_point(number=3, comparability=None),
        make_point(number=4, verdict="rejected"),
    ]
    imported = store.import_report(write_report(tmp_path / "report.json", points))
    assert (imported.added, imported.known) == (2, 0)
    assert imported.left_out == {"skipped": 1, "without a comparability key": 1}
    assert [run.verdict for run in store.runs()] == ["success", "failed"]


def test_a_run_is_there_once_however_often_it_is_reported(store: History, tmp_path: Path) -> None:
    points = [make_point(number=0), make_point(number=1)]
    report = write_report(tmp_path / "a" / "report.json", points)
    assert store.import_report(report).added == 2
    assert store.import_report(report.parent).known == 2
    again = write_report(tmp_path / "b" / "report.json", points, created_at="2027-01-01T00:00:00+00:00")
    assert store.import_report(again) == type(store.import_report(again))(0, 2, {})
    assert len(store.runs()) == 2
    twice = store.import_report(write_report(tmp_path / "c" / "report.json", [make_point(number=2)] * 2))
    assert (twice.added, twice.known) == (1, 1)


def test_what_is_stored_is_what_was_reported(store: History, tmp_path: Path) -> None:
    report = write_report(tmp_path / "report.json", [make_point(2.0, number=3)])
    store.import_report(report)
    (run,), (result,) = store.runs(), read_results(report)
    assert (run.run_id, run.point, run.nodes) == (result.run_id, "t/tp=1", ("n1", "n2"))
    assert run.commit == "a" * 40
    assert run.values["step_time_s"] == (2.0,)
    assert len(run.values["loss_curve"]) == 6
    assert run.environment == {name: value for name, value in ENVIRONMENT.items() if name != "nodes"}
    assert store.fields(run.comparability_id) == {"test": "t", "label": "tp=1"}


def test_times_are_ordered_whatever_their_zone(store: History, tmp_path: Path) -> None:
    times = ("2026-01-01T12:00:00+02:00", "2026-01-01T11:00:00", "2026-01-01T10:30:00Z")  # 10:00, 11:00, 10:30 in UTC
    points = [make_point(1.0 + i, number=i, job={"ended_at": at}) for i, at in enumerate(times)]
    store.import_report(write_report(tmp_path / "report.json", points))
    assert [run.values["step_time_s"][0] for run in store.runs()] == [1.0, 3.0, 2.0]


def test_a_time_that_is_none_is_refused_with_the_whole_report(
    store: History, tmp_path: Path, sentence: Sentence
) -> None:
    points = [make_point(number=0), make_point(number=1, job={"ended_at": "yesterday"})]
    report = write_report(tmp_path / "report.json", points)
    with pytest.raises(BadInput, match=r"report\.json: t/tp=1: ended_at:") as caught:
        store.import_report(report)
    sentence(caught)
    assert not store.path.exists()


def test_reference_is_made_of_the_last_good_runs(store: History, tmp_path: Path) -> None:
    points = [make_point(1.0 + i, number=i, verdict="failed" if i == 4 else "success") for i in range(6)]
    store.import_report(write_report(tmp_path / "report.json", points))
    reference = store.reference(the_key(store), last=3)
    assert reference is not None
    assert [run.values["step_time_s"] for run in reference.runs] == [(3.0,), (4.0,), (6.0,)]
    assert (reference.point, reference.flops_formula, reference.flops_per_step) == ("t/tp=1", "v1", 1e15)
    assert reference.environment["nodes"] == ["n1", "n2"]
    assert store.reference("0" * 16, last=3) is None
    assert store.reference_for("t/tp=1", last=9) == store.reference(the_key(store), last=9)
    assert store.reference_for("t/none", last=9) is None


def test_reference_for_a_point_has_its_newest_key(store: History, tmp_path: Path) -> None:
    points = [make_point(number=i, fields={"gpu": gpu}) for i, gpu in enumerate(("H100", "H100", "GB200"))]
    store.import_report(write_report(tmp_path / "report.json", points))
    reference = store.reference_for("t/tp=1", last=9)
    assert reference is not None
    assert (reference.comparability, len(reference.runs)) == ({"gpu": "GB200"}, 1)


def test_tflops_of_another_formula_are_not_compared(store: History, tmp_path: Path) -> None:
    other = {**make_point()["metrics"], "flops_formula": "v0"}
    points = [make_point(number=0, metrics=other), make_point(number=1)]
    store.import_report(write_report(tmp_path / "report.json", points))
    reference = store.reference(the_key(store), last=9)
    assert reference is not None
    assert [("tflops_per_gpu" in run.values, "step_time_s" in run.values) for run in reference.runs] == [
        (False, True),
        (True, True),
    ]


def test_series_counts_what_it_leaves_out(store: History, tmp_path: Path) -> None:
    points = [make_point(number=i, verdict="failed" if i in (0, 5) else "success") for i in range(8)]
    store.import_report(write_report(tmp_path / "report.json", points))
    series = store.series(the_key(store), "step_time_s", last=4)
    assert (len(series.runs), series.num_good, series.num_failed) == (4, 6, 1)


def test_a_series_has_the_end_of_a_curve_and_no_tflops_of_another_formula(store: History, tmp_path: Path) -> None:
    other = {**make_point()["metrics"], "flops_formula": "v0"}
    points = [make_point(number=0, metrics=other), make_point(number=1), make_point(None, number=2)]
    store.import_report(write_report(tmp_path / "report.json", points))
    key = the_key(store)
    assert [value for _, _, value in store.series(key, "loss_curve", last=9).runs] == [1.5, 1.5, 1.5]
    assert [value for _, _, value in store.series(key, "tflops_per_gpu", last=9).runs] == [
        None,
        pytest.approx(943.0),
        None,
    ]
    first, facts, value = store.series(key, "step_time_s", last=9).runs[0]
    assert (value, first.nodes, first.commit) == (1.0, ("n1", "n2"), "a" * 40)
    assert facts["driver"] == "570.1"


def test_points(store: History, tmp_path: Path) -> None:
    points = [make_point(1.0, number=0), make_point(2.0, number=1), make_point(number=2, verdict="failed")]
    points.append(make_point(number=3, label="tp=2", verdict="failed"))
    store.import_report(write_report(tmp_path / "report.json", points))
    rows = [(row.point, row.num_good, row.num_failed, row.last_value) for row in store.points()]
    assert rows == [("t/tp=1", 2, 1, 2.0), ("t/tp=2", 0, 1, None)]


def test_runs_by_the_start_of_their_id(store: History, tmp_path: Path) -> None:
    store.import_report(write_report(tmp_path / "report.json", [make_point(number=i) for i in range(20)]))
    some = store.runs()[7]
    assert [run.run_id for run in store.runs(run_id_prefix=some.run_id[:12])] == [some.run_id]
    assert len(store.runs(run_id_prefix="")) == 20
    assert store.runs(run_id_prefix="%") == []


@pytest.mark.parametrize("table", ["reports", "keys", "environments", "runs", "held", "withdrawn", "metrics"])
def test_nothing_is_changed_or_removed(store: History, tmp_path: Path, table: str) -> None:
    report = tmp_path / "report.json"
    store.import_report(write_report(report, [make_point()]))
    store.import_report(write_report(report, [make_point(verdict="failed")]))
    with closing(sqlite3.connect(store.path)) as db, db:
        column = db.execute(f"SELECT name FROM pragma_table_info('{table}') LIMIT 1").fetchone()[0]
        for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = {column}"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(statement)
    db.close()


def test_logins_stay_out_of_the_file(store: History, tmp_path: Path) -> None:
    repositories = [{"url": "https://user:s3cret@host/x.git", "commit": "c" * 40}]
    point = make_point(environment={"git": None, "repositories": repositories})
    store.import_report(write_report(tmp_path / "report.json", [point]))
    (run,) = store.runs()
    assert run.environment["repositories"][0]["url"] == "https://host/x.git"
    assert run.commit == "c" * 40


def test_halves_of_characters_and_long_names(store: History, tmp_path: Path) -> None:
    label = "\ud83d<script>'\"; DROP TABLE runs; --" + "x" * 300
    store.import_report(write_report(tmp_path / "report.json", [make_point(label=label)]))
    assert store.points()[0].point == "t/" + label.replace("\ud83d", "?")


def test_a_number_beyond_64_bits_is_refused(store: History, tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"t/tp=1: num_steps") as caught:
        store.import_report(write_report(tmp_path / "report.json", [make_point(num_steps=2**70)]))
    sentence(caught)
    assert not store.path.exists()


def test_values_that_are_too_large_are_none(store: History, tmp_path: Path) -> None:
    store.import_report(write_report(tmp_path / "report.json", [make_point(1e308)]))
    assert "step_time_s" not in store.runs()[0].values


def test_nodes_that_are_no_list_are_one_line(store: History, tmp_path: Path) -> None:
    for nodes in ("n1", [1], {"n1": 1}):
        with pytest.raises(BadInput, match=r"points\.0\.environment\.nodes") as refused:
            store.import_report(write_report(tmp_path / "report.json", [make_point(environment={"nodes": nodes})]))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "spoil",
    [{"num_steps": 8}, {"num_steps": None}, {"steps": 5}, {"loss": "nan"}],
    ids=["6 of 8 steps are", "the requested number of steps", "4 steps after the warm", "the loss is nan at"],
)
def test_a_success_that_would_not_count_is_no_reference(
    store: History, tmp_path: Path, sentence: Sentence, spoil: dict[str, Any]
) -> None:
    loss, more = spoil.get("loss"), {name: value for name, value in spoil.items() if name != "loss"}
    point = make_point(1.5, number=1, **more)
    if loss:
        point["steps"][2]["loss"] = loss
    store.import_report(write_report(tmp_path / "report.json", [make_point(number=0), point]))
    run = store.runs()[1]
    assert run.verdict == "failed"
    sentence(run.reasons[-1])
    reference = store.reference(the_key(store), last=9)
    assert reference is not None
    assert [run.values["step_time_s"] for run in reference.runs] == [(1.0,)]


def test_a_run_that_fails_when_it_is_judged_again_has_failed(store: History, tmp_path: Path) -> None:
    good = [make_point(float(1 + i), number=i) for i in range(3)]
    report = tmp_path / "report.json"
    store.import_report(write_report(report, good))
    again = store.import_report(write_report(report, [*good[:2], make_point(3.0, number=2, verdict="failed")]))
    assert (again.added, again.known, again.rejudged) == (0, 2, 1)
    assert store.import_report(report).known == 3
    assert store.import_report(write_report(report, good)).known == 3
    assert [run.verdict for run in store.runs()] == ["success", "success", "failed"]
    assert [(row.num_good, row.num_failed, row.last_value) for row in store.points()] == [(2, 1, 2.0)]
    series = store.series(the_key(store), "step_time_s", last=9)
    assert ([value for _, _, value in series.runs], series.num_good, series.num_failed) == ([1.0, 2.0], 2, 1)
    reference = store.reference(the_key(store), last=9)
    assert reference is not None
    assert len(reference.runs) == 2
    with closing(sqlite3.connect(store.path)) as db:
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (4,)  # nothing is removed


def test_a_run_twice_in_a_report_with_two_verdicts_has_failed(store: History, tmp_path: Path) -> None:
    for name, verdicts in (("a", ("success", "failed")), ("b", ("failed", "success"))):
        store.import_report(write_report(tmp_path / name, [make_point(label=name, verdict=v) for v in verdicts]))
        assert [run.verdict for run in store.runs(point=f"t/{name}")] == ["failed"]


def test_runs_from_the_future_and_of_a_forged_key_are_left_out_and_said(store: History, tmp_path: Path) -> None:
    points = [make_point(number=i) for i in range(4)]
    for point, days in zip(points, (0, 0.9, 1.1, 0), strict=True):
        point["job"] = {"ended_at": (datetime.now(UTC) + timedelta(days=days)).isoformat()}
    points[3]["comparability"]["id"] = "0" * 16
    imported = store.import_report(write_report(tmp_path / "report.json", points))
    assert (imported.added, imported.left_out) == (
        2,
        {"that ended more than a day in the future": 1, "whose comparability id is not the digest of its fields": 1},
    )


def test_expected_are_the_points_of_the_last_report(store: History, tmp_path: Path) -> None:
    def report(name: str, night: int, labels: str, **more: Any) -> Path:
        return write_report(tmp_path / name, [make_point(number=night, label=label) for label in labels], **more)

    def expected(*without: str) -> tuple[str, ...]:
        return store.points_expected("nightly", "cluster", without=without)

    assert store.import_report(report("b", 1, "ac")).added == 2
    assert expected() == ("t/a", "t/c")
    store.import_report(report("a", 0, "ab"))  # an older one, later
    store.import_report(report("x", 2, "z", scenario="other"))
    store.import_report(report("y", 3, "z", system="other"))
    assert expected() == ("t/a", "t/c")
    assert store.points_expected("other", "cluster") == ("t/z",)
    assert store.points_expected("none", "cluster") == ()
    own = [run.run_id for run in store.runs(point="t/a", last=1)]
    assert expected(*own) == ("t/a", "t/b")
    with_failures = [make_point(number=4, label=v, verdict=v) for v in ("success", "failed", "skipped")]
    store.import_report(write_report(tmp_path / "report.json", with_failures))
    assert expected() == ("t/failed", "t/skipped", "t/success")


def test_a_report_that_grew_expects_all_its_points(store: History, tmp_path: Path) -> None:
    points = [make_point(number=i, label=f"tp={i}") for i in range(3)]
    store.import_report(write_report(tmp_path / "report.json", points[:1]))
    store.import_report(write_report(tmp_path / "report.json", points))
    assert len(store.points_expected("nightly", "cluster")) == 3


def test_a_history_of_before_the_first_release_is_refused(store: History, tmp_path: Path, sentence: Sentence) -> None:
    report = write_report(tmp_path / "report.json", [make_point()])
    store.import_report(report)
    store.close()
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    for work in (store.runs, lambda: store.import_report(report)):
        with pytest.raises(BadInput) as caught:
            work()
        sentence(caught)


@pytest.mark.parametrize("content", [b"hello", b"{}" * 100, b"SQLite format 2\0"])
def test_no_sqlite_file_is_left_as_it_is(tmp_path: Path, sentence: Sentence, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    report = write_report(tmp_path / "report.json", [make_point()])
    for work in (lambda: History(path).runs(), lambda: History(path).import_report(report)):
        with pytest.raises(BadInput) as caught:
            work()
        sentence(caught)
    assert path.read_bytes() == content


@every(
    "damage",
    [
        lambda data: data.replace(b" BEGIN SELECT", b" \xa0EGIN SELECT"),  # a schema that is not text
        lambda data: data[:100] + b"x" * (len(data) - 100),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, sentence: Sentence, damage: Callable[[bytes], bytes]) -> None:
    with History(tmp_path / "history.sqlite") as store:
        store.import_report(write_report(tmp_path / "report.json", [make_point()]))
        store.close()
        store.path.write_bytes(damage(store.path.read_bytes()))
        with pytest.raises(Damaged) as caught:
            store.runs()
        sentence(caught, sqlite=r"(?<=is damaged \().*(?=\);)")


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE x (y)",),
        ("PRAGMA user_version = 7",),
        (f"PRAGMA application_id = {0x6D627269}", "PRAGMA user_version = 3"),
    ],
    ids=["CREATE TABLE x y", "PRAGMA user version 7", "f PRAGMA application id 1835168361"],
)
def test_another_database_is_left_as_it_is(tmp_path: Path, sentence: Sentence, statements: tuple[str, ...]) -> None:
    path = tmp_path / "other.sqlite"
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    before = path.read_bytes()
    report = write_report(tmp_path / "report.json", [make_point()])
    for work in (lambda: History(path).runs(), lambda: History(path).import_report(report)):
        with pytest.raises(BadInput) as caught:
            work()
        sentence(caught)
    assert path.read_bytes() == before


def test_missing_and_empty_files(tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "h?i#%20.sqlite"
    with pytest.raises(BadInput) as caught:
        History(path).runs()
    sentence(caught)
    assert not path.exists()
    path.touch()
    with pytest.raises(BadInput) as caught:
        History(path).runs()
    sentence(caught)
    with History(path) as store:
        assert store.import_report(write_report(tmp_path / "report.json", [make_point()])).added == 1


def test_a_full_disk_loses_nothing_and_is_said(store: History, tmp_path: Path, sentence: Sentence) -> None:
    store.import_report(write_report(tmp_path / "report.json", [make_point()]))
    assert store._writer is not None
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages + 1}")
    big = write_report(tmp_path / "big.json", [make_point(number=i) for i in range(1, 200)])
    with pytest.raises(ToolFailure) as caught:
        store.import_report(big)
    sentence(caught)
    assert len(store.runs(last=1000)) == 1
    store.close()
    assert store.import_report(big).added == 199


def test_a_locked_file_is_said(
    store: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(history_file, "BUSY_TIMEOUT_S", 0.1)
    store.import_report(write_report(tmp_path / "report.json", [make_point()]))
    store.close()
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ToolFailure) as caught:
        store.import_report(write_report(tmp_path / "b.json", [make_point(number=1)]))
    sentence(caught)
    assert len(store.runs()) == 1  # reading goes on
    other.execute("ROLLBACK")
    other.close()
    assert store.import_report(tmp_path / "b.json").added == 1


def test_a_report_that_changes_meanwhile_is_refused(
    store: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    report = write_report(tmp_path / "report.json", [make_point()])

    def read_and_change(path: Path) -> object:
        found = read_report(path)
        write_report(path, [make_point(number=1)])
        return found

    monkeypatch.setattr("cloudai_mbridge.gate.history.read_report", read_and_change)
    with pytest.raises(ToolFailure) as caught:
        store.import_report(report)
    sentence(caught)


@pytest.mark.process
def test_many_first_writers_at_once(tmp_path: Path) -> None:
    reports = [write_report(tmp_path / f"{i}.json", [make_point(number=i)]) for i in range(6)]
    path = tmp_path / "history.sqlite"

    def run(report: Path) -> str:
        done = subprocess.run(
            [sys.executable, WRITER, path, report], capture_output=True, text=True, check=False, timeout=1500
        )
        return done.stdout + done.stderr

    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(run, reports))
    assert outputs == [f"{report} 1 0\n" for report in reports]
    with History(path) as store:
        assert len(store.runs()) == 6


def test_first_writers_in_the_same_instant(tmp_path: Path) -> None:
    """A check that reads the header before another writer's commit and the tables after it refuses its own file."""
    for i in range(20):
        start = threading.Barrier(6)

        def opened(_: int, path: Path = tmp_path / f"{i}.sqlite", start: threading.Barrier = start) -> None:
            start.wait()
            history_file.open_for_writing(path).close()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(opened, range(6)))


@pytest.mark.process
def test_two_writers_one_killed(tmp_path: Path) -> None:
    """Nothing that was said to be in is lost, nothing appears twice, and the file is sound."""
    rng = random.Random(7)
    per_report = 3
    reports = [
        write_report(tmp_path / f"{i}.json", [make_point(number=j, label=f"tp={i}") for j in range(per_report)])
        for i in range(150)
    ]
    path = tmp_path / "history.sqlite"
    reported: set[str] = set()
    killed_amid = 0
    for _ in range(6):
        command = [sys.executable, str(WRITER), str(path)]
        # Both import the same reports, in different orders: they meet
        victim = subprocess.Popen([*command, *map(str, reports)], stdout=subprocess.PIPE, text=True)
        other = subprocess.Popen([*command, *map(str, reversed(reports[75:]))], stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        first = victim.stdout.readline()
        time.sleep(rng.uniform(0, 0.25))
        victim.kill()
        rest, _ = victim.communicate()
        others, _ = other.communicate(timeout=1500)
        assert other.returncode == 0
        killed_amid += victim.returncode != 0
        lines = [line for text in (first, rest, others) for line in text.split("\n") if line.count(" ") == 2]
        reported |= {line.split(" ")[0] for line in lines}
        with History(path) as store:
            found = {run.run_id for run in store.runs(last=10_000)}
        for report in reported:
            assert {run.run_id for run in read_results(Path(report))} <= found
        if len(reported) == len(reports):
            path.unlink()
            reported.clear()
    assert killed_amid >= 3
    with History(path) as store:
        known_or_added = [store.import_report(report) for report in reports]
        assert all(one.added + one.known == per_report for one in known_or_added)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    assert db.execute("SELECT count(*), count(DISTINCT run_id) FROM runs").fetchone() == (450, 450)
    # a transaction is all or nothing: no run without its metrics
    without = "SELECT count(*) FROM runs WHERE NOT EXISTS (SELECT 1 FROM metrics WHERE run = runs.id)"
    assert db.execute(without).fetchone() == (0,)
    db.close()


@pytest.mark.process
def test_reading_goes_on_while_others_write(store: History, tmp_path: Path) -> None:
    store.import_report(write_report(tmp_path / "report.json", [make_point()]))
    reports = [str(write_report(tmp_path / f"{i}.json", [make_point(number=i)])) for i in range(1, 60)]
    writer = subprocess.Popen([sys.executable, WRITER, store.path, *reports], stdout=subprocess.DEVNULL)
    counts = [len(store.runs(last=1000))]
    while writer.poll() is None:
        counts.append(len(store.runs(last=1000)))
    counts.append(len(store.runs(last=1000)))
    assert counts == sorted(counts)
    assert counts[-1] == 60
