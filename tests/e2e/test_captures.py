"""docs/captures: the screen of a real `mbridge run` on Slurm, in terminals of two sizes."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.golden import GoldenFile

pytestmark = pytest.mark.slurm

CAPTURES = Path(__file__).parents[2] / "docs" / "captures"
# The stand-in, told by the name of its point what to do: some have ended, one fails, two wait in the middle
PROGRAM = """#!/bin/bash
case "$PWD" in
  */tp1-pp1-mb16/*) told='{{"says_s": 0.0525, "at": 3, "say": "CUDA out of memory.", "exit": 1}}' ;;
  */tp1-pp1-*) told='{{"says_s": 0.0521}}' ;;
  */tp1-pp2-mb1/*) told='{{"says_s": 0.0534, "at": 28, "wait_for": "{go}"}}' ;;
  */tp1-pp2-mb2/*) told='{{"says_s": 0.054, "at": 12, "wait_for": "{go}"}}' ;;
  *) told='{{}}' ;;
esac
STAND_IN="$told" exec {stand_in} "$@"
"""
COUNTS = "4 done, 1 failed, 2 running, 13 pending, 8 waiting;"


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=2, gpus=4)


def masked(frame: str) -> str:
    """Return a frame with every time, and the GPU-hours, as zeros, and the runs that have just ended in one order."""
    frame = re.sub(r", about [\d:-]+ left", "", re.sub(r"\d\d:\d\d:\d\d", "00:00:00", frame))
    lines = re.sub(r"[\d.e-]+ GPU-hours", "0 GPU-hours", frame).splitlines()
    ended = iter(sorted(line for line in lines if " success " in line))
    return "\n".join(next(ended) if " success " in line else line for line in lines)


@pytest.mark.parametrize(("lines", "columns"), [(24, 80), (40, 120)])
def test_the_screen_is_that_of_the_docs(
    start_run: Any,
    stand_in_test: Any,
    until: Any,
    sandbox: Any,
    tmp_path: Path,
    golden_file: GoldenFile,
    lines: int,
    columns: int,
) -> None:
    program, go = tmp_path / "python", tmp_path / "go"
    program.write_text(PROGRAM.format(go=go, stand_in=Path(__file__).parents[1] / "stand_in" / "training.py"))
    program.chmod(0o755)
    system = (
        f'name = "sandbox"\nscheduler = "slurm"\ndefault_partition = "main"\nmonitor_interval = 0.3\n'
        f'gpus_per_node = 4\nextra_sbatch_args = ["--exclusive"]\npython_executable = "{program}"\n'
        '[[partitions]]\nname = "main"\n'
    )
    layouts = stand_in_test(
        "layouts", steps=50, num_gpus=4, args="gb = 64\ntp = [1, 2]\npp = [1, 2]\nmb = [1, 2, 4, 8, 16]"
    )
    after = '[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "layouts"\n'
    lengths = "gb = 32\nmb = [1, 2, 4, 8]\nseq_length = [64, 128]"
    long = stand_in_test("long", steps=500, num_gpus=4, run=after, args=lengths)
    run = start_run(sandbox, [layouts, long], whole_system=system, terminal=(lines, columns))
    terminal = run.process

    def is_there() -> bool:
        frame = terminal.frame()
        return COUNTS in frame and " 28/50 " in frame and " 12/50 " in frame

    until(lambda: terminal.frame() or terminal.text(), is_there, 6)
    frame = terminal.frame()
    terminal.send_signal(signal.SIGTERM)
    assert terminal.wait(600) == 143
    assert len(frame.splitlines()) < lines
    golden_file(CAPTURES / f"run-{columns}x{lines}.txt", f"{frame}\n", alike=masked)
