"""`mbridge sweep plan` and `mbridge sweep explain`."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def files(repository: Path) -> list[str | Path]:
    return [
        *("--system-config", repository / "systems/local.toml", "--tests-dir", repository / "test_defs"),
        *("--test-scenario", repository / "conf/scenarios/gpt_tiny_sweep.toml"),
    ]


def test_plan_counts_points_and_rules(mbridge: Any, files: list[str]) -> None:
    done = mbridge("sweep", "plan", *files, "--show", "2")
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "sweep: tp(2) x pp(2) x mb(3)",
        "12 points, 6 accepted, 6 rejected",
        "C01 rejects 3",
        "C03 rejects 3",
        "C04 rejects 6",
        "accepted tp1-pp1-mb1",
        "accepted tp1-pp1-mb2",
        "... and 4 more",
    ]


@pytest.mark.parametrize("point", ["tp2-pp1-mb3", "mb=3,tp=2,pp=1"])
def test_explain_says_what_every_rule_says(mbridge: Any, files: list[str], point: str) -> None:
    done = mbridge("sweep", "explain", *files, "sweep", point)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "  C04 cmd_args.gb: 8 is not divisible by mb*dp = 3 (gb=8, mb=3, dp=1); use a multiple of 3" in lines
    assert "  C01 holds" in lines
    assert any(line.startswith("  M20 ") for line in lines)


def test_explain_an_accepted_point(mbridge: Any, files: list[str]) -> None:
    assert mbridge("sweep", "explain", *files, "sweep", "tp1-pp1-mb1").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("swep", "tp=1"), "'swep'"), (("sweep", "cp=1"), "'cp' is no axis"), (("sweep", "tp9"), "no point 'tp9'")],
)
def test_mistakes(mbridge: Any, files: list[str], arguments: tuple[str, ...], words: str) -> None:
    done = mbridge("sweep", "explain", *files, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
