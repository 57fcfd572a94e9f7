"""What the history costs as it grows, and how often its trend is wrong.

    python tests/benchmarks/history.py [RUNS ...] [--series SERIES]

Two parts. The first makes histories of 10,000, 100,000 and 1,000,000 runs, of 50 points, and times whole processes on
each: reading what a gate needs of every point, and `mbridge history trend` of all points, start and imports included.
The baseline, named in the output, is the same command on the smallest history. The second simulates: the rate at which
constant series are said to have changed, and what becomes of planted steps and drifts, at 1 % noise from run to run.
"""

import argparse
import hashlib
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.levels import Levels, find_levels
from cloudai_mbridge.gate.runs import RunResult
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.report.model import comparability_id

SIZES = (10_000, 100_000, 1_000_000)
POINTS = 50
RUNS_PER_REPORT = 1000
REPETITIONS = 3
TARGET_S = 2.0
TARGET_FALSE_ALARMS = 0.01
NOISE = 0.01
START = datetime(2026, 1, 1, tzinfo=UTC)
READ_REFERENCES = """
import sys
from pathlib import Path
from cloudai_mbridge.gate.history import History
with History(Path(sys.argv[1])) as store:
    found = [store.reference(key, last=20) for key in store.keys()]
assert all(len(reference.runs) == 20 for reference in found)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--series", type=int, default=2000, help="Simulated series per figure; 0: none.")
    options = parser.parse_args()
    time_histories(sorted(options.sizes))
    if not options.series:
        return
    print_false_alarms(options.series)
    print_steps(options.series // 4)
    print_drifts(options.series // 4)


def time_histories(sizes: list[int]) -> None:
    print(f"histories of {POINTS} points; every third moves by 5 %; whole processes, best of {REPETITIONS}")
    baseline: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "history.sqlite"
        start = time.perf_counter()
        fill(path, sizes[0])
        print(f"{sizes[0] / (time.perf_counter() - start):.0f} runs/s are added, {RUNS_PER_REPORT} to a report")
        for size in sizes:
            copy(path, sizes[0], size)
            megabytes = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
            print(f"{size} runs: {megabytes:.0f} MB, {1e6 * megabytes / size:.0f} bytes a run")
            for name, command in commands(path).items():
                wall, cpu = min(timed(command) for _ in range(REPETITIONS))
                ratio = wall / baseline.setdefault(name, wall)
                verdict = "within" if wall < TARGET_S else "NOT WITHIN"
                print(f"  {name}: {wall:.2f} s ({cpu:.2f} s CPU), {ratio:.2f} x, {verdict} {TARGET_S:.0f} s")
    print(f"x: times that of {sizes[0]} runs")


def commands(path: Path) -> Mapping[str, list[str]]:
    trend = [sys.executable, "-m", "cloudai_mbridge", "history", "trend", "--history", str(path)]
    return {
        "a Python that does nothing": [sys.executable, "-c", ""],
        "references of all points, 20 runs each": [sys.executable, "-c", READ_REFERENCES, str(path)],
        "trend of one point, 1000 runs": [*trend, "t/p7"],
        "trend of all points, 1000 runs each": trend,
        "list": [*trend[:-3], "list", "--history", str(path)],
    }


def timed(command: list[str]) -> tuple[float, float]:
    """Return the wall time and the processor time of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill(path: Path, size: int) -> None:
    rng = np.random.default_rng(1)
    with History(path) as store:
        for first in range(0, size, RUNS_PER_REPORT):
            runs = [make_run(i, rng) for i in range(first, min(first + RUNS_PER_REPORT, size))]
            store.add(runs, hashlib.sha256(str(first).encode()).hexdigest(), f"reports/{first}/report.json")


def copy(path: Path, base: int, size: int) -> None:
    """Bring a history to a size by later copies of its first runs, in SQL: an import of so many would take minutes."""
    db = sqlite3.connect(path)
    there = db.execute("SELECT count(*) FROM runs").fetchone()[0]
    copies = f"(WITH RECURSIVE k(i) AS (SELECT {there // base} UNION ALL SELECT i + 1 FROM k) SELECT i FROM k LIMIT ?)"
    columns = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
    changed = {
        "id": f"id + i * {base}",
        "run_id": "run_id || i",
        "ended_at": f"strftime('%Y-%m-%dT%H:%M:%f+00:00', ended_at, (i * {base}) || ' minutes')",
    }
    values = ", ".join(changed.get(column, column) for column in columns)
    count = ((size - there) // base,)
    with db:
        db.execute(f"INSERT INTO runs SELECT {values} FROM {copies}, runs WHERE id <= {base}", count)
        db.execute(
            f"INSERT INTO metrics SELECT run + i * {base}, name, value FROM {copies}, metrics WHERE run <= {base}",
            count,
        )
    assert db.execute("SELECT count(*) FROM runs").fetchone()[0] == size
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def make_run(i: int, rng: np.random.Generator) -> RunResult:
    point, night = i % POINTS, i // POINTS
    fields = {"point": point, "device": "GB200"}
    level = 1.05 if point % 3 == 0 and night >= 150 else 1.0
    value = level * float(np.exp(NOISE * rng.normal()))
    return RunResult(
        run_id=hashlib.sha256(str(i).encode()).hexdigest()[:24],
        point=f"t/p{point}",
        iteration=0,
        scenario="nightly",
        system="cluster",
        verdict="failed" if i % 97 == 0 else "success",
        reasons=(),
        comparability_id=comparability_id(fields),
        comparability=fields,
        steps=tuple(StepRecord(step, value, 900.0 / value, 2.0, None, 10.0) for step in range(1, 7)),
        warmup_steps=1,
        num_steps=6,
        flops_formula="v1",
        flops_per_step=1e15,
        tokens_per_step_per_gpu=1024.0,
        nodes=(f"n{i % 64}", f"n{i % 63}"),
        ended_at=(START + timedelta(minutes=i)).isoformat(),
        environment={
            "device": "GB200",
            "packages": {f"package{j}": "1.0" for j in range(60)},
            "driver": f"570.{night // 50}",
        },
        source="",
    )


def autocorrelated(phi: float) -> Callable[[np.random.Generator, int], Any]:
    def noise(rng: np.random.Generator, n: int) -> Any:
        shocks = rng.normal(size=n + 50)
        for i in range(1, len(shocks)):
            shocks[i] += phi * shocks[i - 1]
        return shocks[50:] * np.sqrt(1 - phi**2)

    return noise


NOISES: Mapping[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "Student t, 3 degrees": lambda rng, n: rng.standard_t(3, size=n),
    "log-normal, sigma 0.5": lambda rng, n: np.exp(0.5 * rng.normal(size=n)),
    "two modes, 1 run in 5 slow by 3 sd": lambda rng, n: rng.normal(size=n) + 3 * (rng.random(n) < 0.2),
    "autocorrelated, 0.2": autocorrelated(0.2),
    "autocorrelated, 0.3": autocorrelated(0.3),
    "not promised: autocorrelated, 0.6": autocorrelated(0.6),
    "not promised: log-normal, sigma 0.8": lambda rng, n: np.exp(0.8 * rng.normal(size=n)),
}


def simulated(count: int, n: int, seed: int, noise: str, signal: Any = 0.0) -> Iterator[Levels]:
    rng = np.random.default_rng((seed, n))
    for _ in range(count):
        yield find_levels(np.exp(NOISE * NOISES[noise](rng, n) + signal).tolist())


def print_false_alarms(count: int) -> None:
    print(f"\nconstant series of 1 % noise said to change, of {count} (step, drift, last runs depart)")
    for kind in NOISES:
        for n in (20, 50, 100, 200, 1000):
            found = list(simulated(count if n < 1000 else count // 4, n, 1, kind))
            parts = [sum(bool(part) for part in (getattr(one, name) for one in found)) for name in _PARTS]
            alarms = sum(bool(one.steps or one.drift or one.departure) for one in found) / len(found)
            promised = "" if not 50 <= n <= 200 or "not promised" in kind else ", above 1 %"
            shown = promised if alarms > TARGET_FALSE_ALARMS else ""
            print(f"  {kind}, {n} runs: {100 * alarms:.2f} % {tuple(parts)}{shown}")


_PARTS = ("steps", "drift", "departure")


def print_steps(count: int) -> None:
    print(f"\nplanted steps at 1 % normal noise, of {count}: named; of these at the very run, within the range given")
    for size in (0.01, 0.02, 0.03, 0.05):
        for before, after in ((10, 5), (10, 10), (30, 10), (50, 50), (100, 100)):
            signal = np.repeat([0.0, np.log1p(size)], [before, after])
            found = [one.steps for one in simulated(count, before + after, 2, "normal", signal)]
            named = [steps[0] for steps in found if len(steps) == 1]
            error = [abs(step.index - before) for step in named]
            inside = [step.earliest <= before <= step.latest for step in named]
            place = f"{mean(e == 0 for e in error):.0%} and {mean(inside):.0%}, mean error {mean(error):.1f} runs"
            print(f"  {size:.0%} after {before} runs, {after} runs on: {len(named) / count:.1%}; {place}")


def print_drifts(count: int) -> None:
    print(f"\nplanted drifts at 1 % normal noise, of {count}: called a drift, called a step")
    for per_100 in (0.01, 0.03, 0.1):
        for n in (50, 100, 200):
            found = list(simulated(count, n, 3, "normal", np.arange(n) * per_100 / 100))
            drifts, steps = mean(bool(one.drift) for one in found), mean(bool(one.steps) for one in found)
            print(f"  {per_100:.0%} per 100 runs, {n} runs: {drifts:.1%}, {steps:.1%}")


def mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else float("nan")


if __name__ == "__main__":
    main()
