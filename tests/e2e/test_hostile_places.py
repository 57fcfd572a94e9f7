"""Places that cannot hold a run: full disks, directories that move away, links in circles, values of any length."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, shortened
from tests.cases import every
from tests.forked import run_mbridge
from tests.golden import Sentence

LOCAL = 'name = "l"\nscheduler = "local"\nmonitor_interval = 0.2\n'
STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
SCENARIO = """name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
{run}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
{args}
"""
NINES = 400 * "9"
LONG = 300 * "x"
HUGE = 290_000 * "z"


def mbridge(*args: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    done = run_mbridge(*args, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def dry_run(directory: Path, run: str = "", args: str = "", *options: str) -> "subprocess.CompletedProcess[str]":
    (directory / "system.toml").write_text(LOCAL)
    (directory / "scenario.toml").write_text(SCENARIO.format(run=run, args=args))
    files = ("--system-config=system.toml", "--test-scenario=scenario.toml", "--output-dir=out")
    return mbridge("dry-run", *files, *options, cwd=directory)


@every(
    ("run", "args"),
    [
        *((f'time_limit = "{text}"', "") for text in (NINES, f"{NINES}d", f"{NINES}:00", f"{NINES}-00", "99999999999")),
        *(("", f'time_limit = "{text}"') for text in (NINES, f"{5000 * '9'}m", "2982616-04:14:00")),
    ],
)
def test_a_time_limit_that_slurm_cannot_count(sentence: Sentence, run: str, args: str, tmp_path: Path) -> None:
    done = dry_run(tmp_path, run, args)
    assert done.returncode == 2
    assert "time_limit: " in done.stderr
    sentence(done.stderr)


def test_the_longest_time_limit(tmp_path: Path) -> None:
    assert dry_run(tmp_path, 'time_limit = "4294967293"').returncode == 0


@every("key", ["seq_length", "num_gpus"])
def test_an_integer_beyond_64_bits(sentence: Sentence, key: str, tmp_path: Path) -> None:
    args = "" if key == "num_gpus" else f"{key} = {NINES}"
    done = dry_run(tmp_path, "" if args else f"num_nodes = {NINES}", args)
    assert done.returncode == 2
    sentence(done.stderr)


@every(
    ("run", "args"),
    [("", f"{HUGE} = 1"), (f'nodes = ["{HUGE}["]', ""), (f'test_name = "{HUGE}"', ""), ("", f'tp = "{HUGE}"')],
)
def test_a_message_is_never_long(run: str, args: str, tmp_path: Path) -> None:
    done = dry_run(tmp_path, run, args)
    assert done.returncode == 2
    assert max(map(len, done.stderr.splitlines())) < 1500
    assert "scenario.toml:" in done.stderr


def test_a_long_message_keeps_its_place_and_its_remedy() -> None:
    text = f"a.toml:3: {HUGE} is unknown; use tp"
    short = str(BadInput("\n".join([text] * 150)))
    lines = short.splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 50 more lines like these"
    assert lines[0].startswith("a.toml:3: zzz")
    assert lines[0].endswith("zzz is unknown; use tp")
    assert shortened("short\nlines") == "short\nlines"


@every(
    "args",
    [
        *(("status", LONG), ("resume", LONG), ("cancel", LONG), ("logs", LONG, "x"), ("verify-configs", LONG)),
        *(("generate-report", "--result-dir", LONG), ("gate", LONG, "--policy", LONG), ("compare", LONG, LONG)),
        *(("baseline", "show", LONG), ("status", "/".join([LONG[:200]] * 30))),
    ],
)
def test_a_name_that_no_file_can_have(args: tuple[str, ...], tmp_path: Path) -> None:
    done = mbridge(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "File name too long" in done.stderr


def test_links_in_circles_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "system.toml").write_text(LOCAL)
    for name, target in {
        **{
            "a.toml": "b.toml",
            "b.toml": "a.toml",
            "self.toml": "self.toml",
            "gone.toml": "nowhere",
            "circle": "circle",
        },
        **{"good.toml": "sub/system.toml", "sub/up": "..", ".#edited.toml": "ada@host.1", "notes": "nowhere"},
    }.items():
        (tmp_path / name).symlink_to(target)
    done = mbridge("verify-configs", ".", cwd=tmp_path)
    assert done.returncode == 2
    wrong = {line.split(": ")[1]: line for line in done.stderr.splitlines()}
    assert wrong.keys() == {"a.toml", "b.toml", "self.toml", "gone.toml", "circle"}
    assert "leads in a circle" in wrong["self.toml"]
    assert "leads nowhere" in wrong["gone.toml"]
    assert "sub/up: is a link to a directory and was not followed" in done.stdout
    assert "ok    good.toml" in done.stdout


@pytest.mark.parametrize("size", ["16k", "32k", "40k", "48k", "64k", "100k"])
def test_a_full_disk_is_named(size: str, tmp_path: Path) -> None:
    """A file system of a few pages is full at a script, the lock, the journal, or SQLite's files beside it."""
    mount = f"mount -t tmpfs -o size={size} none full"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    (tmp_path / "full").mkdir()
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], cwd=tmp_path, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (tmp_path / "system.toml").write_text(f'{LOCAL}python_executable = "{STAND_IN}"\n')
    (tmp_path / "scenario.toml").write_text(SCENARIO.format(run="iterations = 2", args=""))
    run = 'exec "$0" -m cloudai_mbridge run --system-config system.toml --test-scenario scenario.toml --output-dir full'
    done = subprocess.run(
        [*unshare, f"{mount} && {run}", sys.executable], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert f"error: {tmp_path}/full/s_" in line or "error: full/s_" in line
    assert "No space left on device (" in line
    assert "KiB free); make room and try again" in line


def test_the_directory_moves_away(start_run: Any, stand_in_test: Any, until: Callable[..., Any]) -> None:
    system = f'{LOCAL}python_executable = "{STAND_IN}"\n'
    run = start_run(None, [stand_in_test("t", {"step_s": 0.2}, steps=1000), stand_in_test("u")], whole_system=system)
    until("the run's log", lambda: "MBRIDGE_RUN" in run.log("t"))
    root = run.root
    os.rename(run.directory / "out", run.directory / "moved")
    run.finish(3)
    assert f"{root}: was moved or deleted while mbridge was running" in run.stderr
    assert not (run.directory / "out").exists()
    cancelled = mbridge("cancel", str(run.directory / "moved" / root.name), cwd=run.directory)
    assert cancelled.returncode == 0, cancelled.stderr
