"""Damaged files end in a message and an exit code: no traceback, no hang, bounded memory, nothing written elsewhere.

The samples are a real run's own files. A seed makes a mutant: MBRIDGE_FUZZ_SEED is the first, and MBRIDGE_FUZZ_S says
how long the drill goes on for each reader (600 s).
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.forked import COMMANDS, run_mbridge

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests" / "stand_in" / "training.py"
BOUNDED = Path(__file__).parent / "bounded.py"
HANG_S = 10
MEMORY = 2 << 30
LARGEST = 64 << 20  # of a line and its copies
EXIT_CODES = {*range(17)}
JUDGED = {0, *range(10, 15)}
SYSTEM = f'name = "local"\nscheduler = "local"\npython_executable = "{STAND_IN}"\n'
SCENARIO = """name = "fuzz"
[[Tests]]
id = "a"
name = "a"
description = "d"
test_template_name = "MegatronBridge"
iterations = 3
time_limit = "00:10:00"
[Tests.metrics]
warmup_steps = 2
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 8
tp = [1, 2]
mb = 1
gb = 8
[Tests.extra_env_vars]
A = "b c"
[runner]
retries = 0
"""
HISTORY_POLICY = """name = "p"
min_runs = 2
[history]
file = "history.sqlite"
[[metrics]]
name = "step_time_s"
[[metrics]]
name = "loss_curve"
"""
GPU_SYSTEM = """name = "cluster"
scheduler = "local"
gpu_type = "a100"
calibration = "factors.toml"
[prices]
a100 = 2.5
"""
FACTORS = """version = 1
gpu = "a100"
points = 12
memory = 1.1
[step_time]
compute = 1.3
links = 2.0
[held_out]
shipped = 0.4
calibrated = 0.08
"""
TABLE = "gpu,num_gpus,recipe,gbs,mbs,seq_length,tp,pp,cp,vp,ep,step_time_s\n" + "".join(
    f"a100,8,gpt_small,32,{mbs},128,{tp},{pp},1,1,1,{'oom' if mbs == 4 and tp == pp else 0.1 + 0.01 * tp * pp / mbs}\n"
    for tp, pp, mbs in itertools.product((1, 2), (1, 2), (1, 2, 4))
)
POLICY = f"""name = "p"
baseline = "baseline.toml"
min_runs = 2
[[metrics]]
name = "step_time_s"
margin = 0.03
tolerance = 0.1
[[waivers]]
point = "a/tp1"
metric = "step_time_*"
up_to = 0.5
by = "b"
reason = "a known regression of the driver"
until = {date.today() + timedelta(days=30)}
"""
WEIRD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, "", " ", "a", "..", "/etc/passwd", "../../x", "\0"),
    *("x" * 100_000, "nan", "inf", "1e999", "\ud83d\ude00", "\x1b[31m", "${HOME}", "$(id)", "%j", "\\", "\n"),
    *([], {}, [[]], {"a": {}}, ["a", 1], [None] * 1000, "1-99999", "00:00", "9" * 400),
)
LOG_LINES = (
    'MBRIDGE_STEP {"version": 1, "step": 3, "step_time_s": 1e999, "losses": {"lm loss": NaN}}',
    'MBRIDGE_STEP {"version": 1, "step": 1000000000000, "step_time_s": 0.1}',
    'MBRIDGE_RUN {"version": 99}',
    "MBRIDGE_STEP " + "[" * 5000,
    "Step Time : 1e400s GPU utilization: --1.0 MODEL_TFLOP/s/GPU",
    " [2025-01-01 00:00:00] iteration 5/ 10 | lm loss: 1E+999 |",
    "x" * 2_000_000,
    "\0" * 1000,
    "torch.OutOfMemoryError: CUDA out of memory. " * 2000,
)
TOML_LINES = ("[a]", "[[a.b]]", "x = 1", "a.b.c = {}", '"" = 1', "[" * 3000, f"x = {'[' * 3000}")


@dataclass(frozen=True)
class Reader:
    """A file that commands read: its path below the case, what it is, and the commands."""

    path: str
    kind: str
    commands: tuple[tuple[str, ...], ...]


REPORTS = ("generate-report", "--result-dir", "run")
READERS = {
    "system": Reader("system.toml", "toml", (("verify-configs", "system.toml"),)),
    "scenario": Reader(
        "scenario.toml",
        "toml",
        (
            ("verify-configs", "scenario.toml"),
            ("dry-run", "--system-config", "system.toml", "--test-scenario", "scenario.toml", "--output-dir", "out"),
            ("sweep", "plan", "--system-config", "system.toml", "--test-scenario", "scenario.toml"),
        ),
    ),
    "log": Reader("run/a/tp1/0/stdout.txt", "log", (REPORTS, ("logs", "run", "a/tp1/0", "-n", "5"))),
    "errors": Reader("run/a/tp1/0/stderr.txt", "log", (REPORTS,)),
    "journal": Reader("run/journal.sqlite", "sqlite", (("status", "run", "--events"), REPORTS, ("cancel", "run"))),
    "plan": Reader("run/plan.json", "json", (("status", "run"), REPORTS, ("gate", "run", "--policy", "policy.toml"))),
    "report": Reader(
        "run/report.json",
        "json",
        (
            ("gate", "run", "--policy", "policy.toml"),
            ("compare", "run", "run"),
            ("history", "import", "run", "--history", "new.sqlite"),
            ("baseline", "promote", "run", "--baseline", "new.toml", "--reason", "r", "--yes", "--min-runs", "2"),
        ),
    ),
    "policy": Reader("policy.toml", "toml", (("gate", "run", "--policy", "policy.toml"),)),
    "baseline": Reader(
        "baseline.toml",
        "toml",
        (
            ("gate", "run", "--policy", "policy.toml"),
            ("baseline", "show", "baseline.toml"),
            ("baseline", "check", "baseline.toml"),
        ),
    ),
    "history": Reader(
        "history.sqlite",
        "sqlite",
        (
            ("history", "list", "--history", "history.sqlite"),
            ("history", "trend", "--history", "history.sqlite"),
            ("history", "import", "run", "--history", "history.sqlite"),
            ("history", "show", "a/tp1", "--history", "history.sqlite"),
            ("gate", "run", "--policy", "history-policy.toml"),
            ("generate-report", "--result-dir", "run", "--history", "history.sqlite"),
        ),
    ),
    "calibration": Reader(
        "factors.toml",
        "toml",
        (
            ("verify-configs", "gpu-system.toml"),
            ("estimate", "--recipe", "gpt_small", "--num-gpus", "8", "--system-config", "gpu-system.toml"),
        ),
    ),
    "table of measurements": Reader("table.csv", "log", (("calibrate", "table.csv", "--output", "new.toml"),)),
    "resolved configuration": Reader("run/a/tp1/0/test.toml", "toml", (("verify-configs", "run/a/tp1/0/test.toml"),)),
}


# ---- mutants


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    """Return a damaged copy: damaged in its grammar mostly, else in its bytes."""
    by_grammar = {"json": mutate_json, "toml": mutate_lines, "log": mutate_lines, "sqlite": mutate_database}[kind]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        with contextlib.suppress(ValueError, sqlite3.Error, RecursionError):
            data = by_grammar(data, rng) if rng.random() < 0.75 else mutate_bytes(data, rng)
    return data


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed, at = bytearray(data), rng.randrange(len(data) + 1)
    what = rng.randrange(5)
    if what == 0:
        return bytes(changed[:at])
    if what == 1:
        changed[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
    elif what == 2:
        del changed[at : at + rng.choice((1, 10, 1000))]
    elif what == 3 and changed:
        changed[at % len(changed)] ^= 1 << rng.randrange(8)
    else:
        start = rng.randrange(len(data) + 1)
        changed[at:at] = changed[start : start + 200] * rng.choice((1, 100))
    return bytes(changed)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    document = json.loads(data)
    places = list(_places(document))
    holder, name = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del holder[name]
    elif what == 1 and isinstance(holder, dict):
        holder[str(rng.choice(WEIRD))] = holder.pop(name)
    elif what == 2:
        other, place = rng.choice(places)
        holder[name] = json.loads(json.dumps(other[place]))
    elif what == 3 and isinstance(holder, list):
        holder += [holder[name]] * rng.choice((1, 50))
    else:
        holder[name] = rng.choice(WEIRD)
    text = json.dumps(document)
    if rng.random() < 0.05:  # a key that appears twice
        text = text.replace("{", '{"version": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from _places(value[name])


def mutate_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    at = rng.randrange(len(lines))
    what = rng.randrange(7)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines[at:at] = [lines[at]] * min(rng.choice((1, 3, 2000)), LARGEST // (len(lines[at]) + 1))
    elif what == 2:
        lines.insert(at, rng.choice(lines))
    elif what == 3 and "=" in lines[at]:
        value = rng.choice(WEIRD)
        text = json.dumps(value) if not isinstance(value, dict) and value is not None else "{}"
        lines[at] = f"{lines[at].partition('=')[0]}= {text}"
    elif what == 4:
        lines.insert(at, rng.choice(LOG_LINES))
    elif what == 5:
        lines.insert(
            at, rng.choice(("[a]", "[[a.b]]", "x = 1", "a.b.c = {}", '"" = 1', "[" * 3000, "x = " + "[" * 3000))
        )
    else:
        words = lines[at].split(" ")
        words[rng.randrange(len(words))] = str(rng.choice(WEIRD))
        lines[at] = " ".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutate_database(data: bytes, rng: random.Random) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "mutant.sqlite")
        path.write_bytes(data)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            for (trigger,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                db.execute(f'DROP TRIGGER "{trigger}"')  # a history refuses to be changed
            tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = rng.choice(tables)
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
            column, value = rng.choice(columns), rng.choice(WEIRD)
            value = value if value is None or isinstance(value, str | float) else json.dumps(value)
            value = (
                value.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if isinstance(value, str) else value
            )
            statement = rng.choice(
                (
                    f'UPDATE "{table}" SET "{column}" = ?',
                    f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = (SELECT max(rowid) FROM "{table}")',
                    f'DELETE FROM "{table}" WHERE ? IS NOT NULL',
                    f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
                    f'DROP TABLE "{table}"',
                    f"PRAGMA user_version = {rng.randrange(200)}",
                )
            )
            db.execute(statement, (value,) if "?" in statement else ())
        return path.read_bytes()


# ---- one command


def in_child(argv: tuple[str, ...], here: Path) -> tuple[int, str]:
    """Run a command within bounds; return its exit code, or minus a signal, and its text."""
    program = [str(BOUNDED), str(HANG_S), str(MEMORY), *argv]
    try:  # seconds of a machine that does other things, too
        done = COMMANDS.run(program, here, os.environ, timeout=HANG_S * 6)
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM, ""
    assert done is not None, "a real start would take longer than the command"
    return done.returncode, done.stdout + done.stderr


@dataclass
class Case:
    """A directory with all files, and a neighbour that nobody may write."""

    here: Path
    original: Path

    def restore(self) -> None:
        shutil.rmtree(self.here)
        shutil.copytree(self.original, self.here, symlinks=True)

    def outside(self) -> dict[str, int]:
        """Return what lies outside, with the times of its last change."""
        paths = [path for path in self.here.parent.rglob("*") if self.here not in (path, *path.parents)]
        return {str(path): path.lstat().st_mtime_ns for path in paths if path.name != "said"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two points and three iterations with its reports, a baseline, a policy and a history."""
    directory = tmp_path_factory.mktemp("original") / "case"
    directory.mkdir()
    texts = {"system": SYSTEM, "scenario": SCENARIO, "policy": POLICY, "history-policy": HISTORY_POLICY}
    texts |= {"gpu-system": GPU_SYSTEM, "factors": FACTORS}
    for name, text in texts.items():
        (directory / f"{name}.toml").write_text(text)
    (directory / "table.csv").write_text(TABLE)

    def mbridge(*argv: str, codes: Collection[int] = (0,)) -> None:
        done = run_mbridge(*argv, cwd=directory)
        assert done.returncode in codes, done.stdout + done.stderr

    mbridge("run", "--system-config", "system.toml", "--test-scenario", "scenario.toml", "--output-dir", "out")
    (root,) = (directory / "out").iterdir()
    root.rename(directory / "run")
    (directory / "out").rmdir()
    rng = random.Random(0)

    def other_times(_: "re.Match[str]") -> str:
        time_s = 0.5 + rng.gauss(0, 0.001)
        return f'"step_time_s": {time_s}, "tflops_per_gpu": {0.5 / time_s}'

    def measure_again() -> None:  # the stand-in's steps all take the same time
        for log in (directory / "run").rglob("stdout.txt"):
            log.write_text(re.sub(r'"step_time_s": [0-9.]+, "tflops_per_gpu": [0-9.]+', other_times, log.read_text()))
        mbridge("generate-report", "--result-dir", "run")

    measure_again()
    mbridge("history", "import", "run", "--history", "history.sqlite")
    measure_again()
    terms = ("--reason", "r", "--by", "b", "--yes", "--min-runs", "2", "--max-noise", "1")
    mbridge("baseline", "promote", "run", "--baseline", "baseline.toml", *terms)
    mbridge("history", "import", "run", "--history", "history.sqlite")
    measure_again()
    for policy in ("policy.toml", "history-policy.toml"):
        mbridge("gate", "run", "--policy", policy, codes=JUDGED)
    for name in ("calibration", "table of measurements"):  # the others are played by what is above
        for argv in READERS[name].commands:
            mbridge(*argv)
    (directory / "new.toml").unlink()
    report = json.loads((directory / "run/report.json").read_text())
    del report["digest"]  # of a mutant, only that would be read
    (directory / "run/report.json").write_text(json.dumps(report))
    return directory


def mistake(case: Case, reader: Reader, seed: int) -> str:
    """Play one mutant; return what is wrong with how it was taken, "" if nothing is."""
    rng = random.Random(seed)
    target = case.here / reader.path
    target.write_bytes(mutate((case.original / reader.path).read_bytes(), reader.kind, rng))
    argv = rng.choice(reader.commands)
    before = case.outside()
    code, said = in_child(argv, case.here)
    words = f"seed {seed}, {' '.join(argv)}: exit code {code}: {said[-2000:]}"
    if code not in EXIT_CODES or "Traceback" in said or "defect of mbridge" in said:
        return words
    of_the_file = target.stat().st_size if argv[0] == "logs" else 0  # `logs` shows lines as they are, however long
    if len(said) > (1 << 20) + of_the_file:
        return f"seed {seed}, {' '.join(argv)}: {len(said)} characters"
    if case.outside() != before:
        return f"written outside: {words}"
    return ""


def play(original: Path, directory: Path, name: str, seeds: Callable[[], Iterator[int]]) -> tuple[int, list[str]]:
    """Play mutants; return how many, and what was wrong with them."""
    case = Case(directory / "case", original)
    shutil.copytree(original, case.here, symlinks=True)
    (directory / "neighbour").write_text("x")
    count, found = 0, []
    for seed in seeds():
        if wrong := mistake(case, READERS[name], seed):
            found.append(wrong)
        case.restore()
        count += 1
        if len(found) == 10:
            break
    return count, found


@pytest.mark.parametrize("name", READERS)
def test_a_few_mutants(original: Path, tmp_path: Path, name: str) -> None:
    _, found = play(original, tmp_path, name, lambda: iter(range(8)))
    assert not found, "\n".join(found)


@pytest.mark.drill
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", READERS)
def test_ten_minutes_of_mutants(original: Path, tmp_path: Path, name: str) -> None:
    first = int(os.environ.get("MBRIDGE_FUZZ_SEED") or random.randrange(1 << 30))
    end = time.monotonic() + float(os.environ.get("MBRIDGE_FUZZ_S", "600"))

    def seeds() -> Iterator[int]:
        seed = first
        while time.monotonic() < end:
            yield seed
            seed += 1

    count, found = play(original, tmp_path, name, seeds)
    print(f"{name}: {count} mutants, seeds {first} to {first + count - 1}, {len(found)} wrong")
    assert not found, "\n".join(found)
