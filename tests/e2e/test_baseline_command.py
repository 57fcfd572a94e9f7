"""`mbridge baseline`: from report.json files to a reviewed diff, and what is refused."""

import json
import math
import os
import pty
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.commands.gate.baseline import REFUSED
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.report.model import comparability_id
from tests.forked import run_mbridge
from tests.golden import Sentence

REPOSITORY = Path(__file__).parents[2]

Write = Callable[..., Path]


def _point(i: int, point: str, noise: float, level: float, **changes: Any) -> dict[str, Any]:
    """Return the point of one run, as report.json has it in version 2."""
    dice = random.Random(f"{i}{point}")
    test_id, _, label = point.partition("/")
    time = level * (1 + noise * (-1.2, -0.5, 0.1, 0.6, 1.0)[i % 5])
    steps = [
        {
            "step": n,
            "step_time_s": time * math.exp(dice.gauss(0, 0.002)),
            "tflops_per_gpu": 5 / time,
            "loss": 6 - 0.01 * n,
            "peak_memory_gib": 1.5,
        }
        for n in range(1, 16)
    ]
    fields = {"device": "CPU", "tp": 2, "driver": None, "work": point}
    return {
        "key": f"{point}/{i}",
        "test_id": test_id,
        "label": label,
        "iteration": i,
        "verdict": "success",
        "reasons": [],
        "num_steps": 15,
        "job": {"ended_at": f"2026-11-1{i}T10:00:00+00:00"},
        "attempts": [{"job_id": str(i), "submitted_at": "2026-11-21T10:00:00+00:00"}],
        "comparability": {"id": comparability_id(fields), "fields": fields},
        "environment": {"device": "CPU", "packages": {"torch": "2.6"}, "nodes": [f"n{i}"], "SECRET": "hunter2"},
        "metrics": {
            "warmup_steps": 3,
            "flops_formula": "megatron-bridge/new",
            "flops_per_step": 1e12,
            "tokens_per_step_per_gpu": 4096.0,
        },
        "steps": steps,
        **changes,
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a report.json: write("name", point="a/b", noise=0.01, level=0.1, changes={4: {...}}) -> its path."""

    def report(
        name: str = "r",
        points: Sequence[str] = ("sweep/tp2",),
        noise: float = 0.01,
        level: float = 0.1,
        changes: dict[int, dict[str, Any]] | None = None,
    ) -> Path:
        runs = [_point(i, point, noise, level, **(changes or {}).get(i, {})) for point in points for i in range(5)]
        file = tmp_path / name / "report.json"
        file.parent.mkdir(exist_ok=True)
        head = {"schema_version": 2, "scenario": "s", "system": "local", "created_at": "2026-11-21T10:10:00+00:00"}
        file.write_text(json.dumps({**head, "points": runs}))
        return file

    return report


def _start(*args: str | Path, **options: Any) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "cloudai_mbridge", "baseline", *map(str, args)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(argv, text=True, cwd=REPOSITORY, **pipes)


def _baseline(*args: str | Path) -> "subprocess.CompletedProcess[str]":
    done = run_mbridge("baseline", *args, cwd=REPOSITORY)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def _promote(report: Path, path: Path, *more: str | Path) -> "subprocess.CompletedProcess[str]":
    return _baseline("promote", report, "--baseline", path, "--reason", "the first one", *more)


def test_nothing_is_written_without_a_yes(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "new/b.toml"
    unconfirmed = f"error: {path}: not written: there is no terminal to confirm it at; write it with --yes"
    for more, code, words in (((), 16, unconfirmed), (("--yes", "--dry-run"), 0, "--dry-run: nothing written")):
        done = _promote(write(), path, *more)
        assert done.returncode == code
        assert "+++ " in done.stdout
        assert '+point = "sweep/tp2"' in done.stdout
        assert words in (done.stderr if code else done.stdout)
        assert not path.parent.exists()


def test_promote_show_and_check(write: Write, tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "b.toml"
    done = _promote(write(), path, "--yes", "--by", "Ada")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"written: {path}, 1 point promoted\n")
    assert "hunter2" not in done.stdout + path.read_text()
    (point,) = load_baseline(path).points
    assert (point.promoted_by, point.reason, len(point.runs)) == ("Ada", "the first one", 5)

    shown = _baseline("show", path)
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in ("step_time_s", "loss_curve", "-3.0% to +3.0%", " s ", "GiB"))
    assert f"sweep/tp2: 5 runs, promoted {point.promoted_at} by Ada: the first one" in shown.stdout

    checked = _baseline("check", path)
    assert (checked.returncode, checked.stdout) == (0, f"ok    {path}: 1 point, 0 warnings\n")

    path.write_text(path.read_text().replace("tp = 2", "tp = 4"))
    for command in ("show", "check"):
        refused = _baseline(command, path)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: {path}:")
        assert "comparability_id" in refused.stderr
        sentence(refused.stderr)


def test_who_promotes_is_gits_user(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "Grace $(id)")
    _promote(write(), tmp_path / "b.toml", "--yes")
    assert load_baseline(tmp_path / "b.toml").points[0].promoted_by == "Grace $(id)"


def test_without_git_it_is_the_login_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada")
    _promote(write(), tmp_path / "b.toml", "--yes")
    assert load_baseline(tmp_path / "b.toml").points[0].promoted_by == "ada"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"noise": 0.1}, ()),
        ({"changes": {4: {"verdict": "failed", "reasons": ["died at step 20"]}}}, ()),
        ({}, ("--min-runs", "6")),
        ({}, ("--max-noise", "0.001")),
    ],
    ids=["step time s varies by", "is not a good run", "it has 5 of the", "more than 0 1"],
)
def test_a_refusal_has_its_own_exit_code(
    write: Write, tmp_path: Path, sentence: Sentence, options: dict[str, Any], more: tuple[str, ...]
) -> None:
    done = _promote(write(**options), tmp_path / "b.toml", "--yes", *more)
    assert done.returncode == REFUSED == 15
    assert done.stderr.startswith("error: refused sweep/tp2: ")
    sentence(done.stderr)
    assert not (tmp_path / "b.toml").exists()


def test_laxer_limits_are_noted(write: Write, tmp_path: Path) -> None:
    done = _promote(write(), tmp_path / "b.toml", "--dry-run", "--min-runs", "4")
    assert "note: --min-runs 4: the rule is 5" in done.stdout


def test_a_point_can_be_left_out(write: Write, tmp_path: Path, sentence: Sentence) -> None:
    path, report = tmp_path / "b.toml", write(points=["sweep/tp2", "sweep/tp4"])
    data = json.loads(report.read_text())
    data["points"][-1]["verdict"] = "failed"
    report.write_text(json.dumps(data))
    done = _promote(report, path, "--yes")
    assert done.returncode == REFUSED
    sentence(done.stderr)
    assert _promote(report, path, "--yes", "--point", "*/tp2").returncode == 0
    assert [point.point for point in load_baseline(path).points] == ["sweep/tp2"]


def test_a_regression_must_be_accepted(write: Write, tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "b.toml"
    assert _promote(write(), path, "--yes").returncode == 0
    before, slower = path.read_bytes(), write("slower", level=0.105)
    done = _promote(slower, path, "--yes")
    assert done.returncode == REFUSED
    assert "step_time_s" in done.stderr
    sentence(done.stderr)
    assert path.read_bytes() == before
    policy = tmp_path / "p.toml"
    policy.write_text(
        'name = "p"\nbaseline = "b.toml"\n[[metrics]]\nname = "step_time_s"\nmargin = 0.1\ntolerance = 0.2\n'
        '[[metrics]]\nname = "step_time_mean_s"\nmargin = 0.1\ntolerance = 0.2\n'
    )
    assert _promote(slower, path, "--dry-run", "--policy", policy).returncode == 0
    assert _promote(slower, path, "--yes", "--accept-regression").returncode == 0
    assert "accepted: step_time_s is worse by +5.00%" in _baseline("show", path).stdout


@pytest.mark.parametrize(
    "args",
    [
        ("promote", "{tmp}/none.json", "--baseline", "b.toml", "--reason", "x"),
        ("promote", "{report}", "--baseline", "b.toml"),
        ("promote", "{report}", "--baseline", "b.toml", "--reason", " "),
        ("promote", "{report}", "--baseline", "{tmp}", "--reason", "x"),
        ("promote", "{report}", "--baseline", "{report}", "--reason", "x"),
        ("promote", "{report}", "--baseline", "b.toml", "--reason", "x", "--point", "y"),
        ("promote", "--baseline", "b.toml", "--reason", "x"),
        ("show", "{tmp}/none.toml"),
    ],
    ids=[
        "none json cannot be read",
        "reason",
        "reason is write why",
        "cannot be read",
        "not valid TOML",
        "matches no point",
        "RUN",
        "no such file",
    ],
)
def test_bad_input_is_one_line(write: Write, tmp_path: Path, sentence: Sentence, args: tuple[str, ...]) -> None:
    report = write()
    done = _baseline(*(arg.format(tmp=tmp_path, report=report) for arg in args))
    assert done.returncode == 2
    sentence(done.stderr)
    assert not (REPOSITORY / "b.toml").exists()


def test_hostile_names_cannot_reach_the_terminal(write: Write, tmp_path: Path) -> None:
    path, name = tmp_path / "b.toml", 'a"]\n[x/\x1b[31m\u202e[bold]<script>'
    done = _promote(write(points=[name]), path, "--yes", "--by", "\x1b[2J")
    assert done.returncode == 0, done.stderr
    shown, checked = _baseline("show", path), _baseline("check", path)
    refused = _promote(write(points=[name], noise=0.2), path, "--yes")
    assert refused.returncode == REFUSED
    for text in (done.stdout, shown.stdout, checked.stdout, refused.stderr):
        assert all(line.isprintable() for line in text.split("\n"))
    assert "[bold]<script>" in shown.stdout
    assert load_baseline(path).points[0].point == name


def test_promotions_at_the_same_time_lose_nothing(write: Write, tmp_path: Path) -> None:
    path, names = tmp_path / "b.toml", [f"sweep/{i}" for i in range(4)]
    reports = [write(f"r{i}", points=[name]) for i, name in enumerate(names)]
    started = [_start("promote", report, "--baseline", path, "--reason", "together", "--yes") for report in reports]
    ended = [process.communicate(timeout=1500) for process in started]
    assert [process.returncode for process in started] == [0] * 4, ended
    assert [point.point for point in load_baseline(path).points] == names


@pytest.mark.parametrize(("answer", "is_written"), [("y", True), ("n", False), ("", False)])
def test_at_a_terminal_it_asks(write: Write, tmp_path: Path, answer: str, is_written: bool) -> None:
    path = tmp_path / "b.toml"
    master, slave = pty.openpty()
    process = _start("promote", write(), "--baseline", path, "--reason", "asked", stdin=slave)
    os.write(master, f"{answer}\n".encode())
    stdout, stderr = process.communicate(timeout=600)
    os.close(master)
    os.close(slave)
    assert process.returncode == 0, stderr
    assert "[y/N]" in stdout
    assert path.exists() is is_written
    assert ("nothing written" in stdout) is not is_written


def test_starting_the_command_line_imports_nothing_heavy() -> None:
    program = (
        "import sys, cloudai_mbridge.commands.gate.baseline, cloudai_mbridge.commands.plan.verify; print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "scipy", "ruptures"} & set(modules)


def test_verify_configs_knows_policies_and_baselines(
    mbridge: Any, write: Write, tmp_path: Path, sentence: Sentence
) -> None:
    conf = tmp_path / "conf"
    assert _promote(write(), conf / "b.toml", "--yes").returncode == 0
    (conf / "p.toml").write_text('name = "p"\nbaseline = "b.toml"\n')
    done = mbridge("verify-configs", conf)
    assert done.returncode == 0, done.stderr
    assert f"ok    {conf}/b.toml: baseline of 1 point" in done.stdout
    assert f"ok    {conf}/p.toml: policy 'p': 5 metrics against {conf}/b.toml\n" in done.stdout
    (conf / "b.toml").write_text((conf / "b.toml").read_text().replace("n = 5", "n = 4"))
    (conf / "p.toml").write_text('name = "p"\nbaseline = "c.toml"\nmin_runs = 0\n')
    done = mbridge("verify-configs", conf)
    assert done.returncode == 2
    assert "p.toml:3: min_runs:" in done.stderr
    sentence(done.stderr)
    assert "step_time_s" in done.stderr
