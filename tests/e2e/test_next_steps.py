"""The next steps that a red gate prints, each followed as it stands there."""

import json
import os
import pty
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.gate.next_steps import NextSteps
from cloudai_mbridge.gate.policy import NO_REASON, load_policy
from cloudai_mbridge.gate.renderings import render_next_steps
from tests.e2e.ci_project import SCENARIO, Project
from tests.e2e.test_gate_command import make_report, write_points

AUTHOR = "-c user.name=Ada -c user.email=ada@example.com"
HOSTILE = "$(touch pwned) `touch pwned`'\"\n; touch pwned #```"


def run(project: Project, name: str) -> str:
    """Run the scenario and return the run's directory, as a CI names it."""
    project.good(f"mbridge run {SCENARIO} --output-dir results/{name}")
    (root,) = (project.root / "results" / name).iterdir()
    return str(root.relative_to(project.root))


def reasoned(step: str) -> str:
    """Write a reason in place of the placeholder."""
    assert NO_REASON in step
    return step.replace(NO_REASON, "the new collective, ticket 7")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A repository with a baseline, and a commit after it that sets a variable and makes every step slower."""
    made = Project(tmp_path_factory.mktemp("steps"))
    commit = f"git add conf systems test_defs ci && git {AUTHOR} commit -qm"
    made.good(f"git init -q . && {commit} first")
    promote = f"mbridge baseline promote {run(made, 'old')} --baseline ci/baseline.toml --policy ci/policy.toml"
    made.good(f"{promote} --reason first --yes")
    scenario = made.root / "conf" / "scenarios" / "nightly.toml"
    scenario.write_text(f'{scenario.read_text()}\n[Tests.extra_env_vars]\nNCCL_ALGO = "Tree"\n')
    (made.root / "slow").touch()
    made.good(f"{commit} 'Set NCCL_ALGO'")
    return made


@pytest.fixture(scope="module")
def red(project: Project) -> tuple[str, str, dict[str, Any]]:
    """The run that regressed, the output of its gate, and the next steps as JSON."""
    new = run(project, "new")
    done = project.run(f"mbridge gate {new} --policy ci/policy.toml --markdown gate.md --json gate.json")
    assert done.returncode == 10, done.stdout + done.stderr
    return new, done.stdout, json.loads((project.root / "gate.json").read_text())["next_steps"]


def test_the_same_steps_everywhere(project: Project, red: Any) -> None:
    _, text, steps = red
    assert text.startswith("llama3_8b is "), "a test's only point is the test"
    lines, markdown = text.splitlines(), (project.root / "gate.md").read_text()
    for name in ("commits", "reproduce", "accept"):
        assert f"{name}: {steps[name]}" in lines
        assert f"```sh\n{steps[name]}\n```" in markdown
    assert f"waive: add to ci/policy.toml:\n{steps['waiver']}" in text
    assert f"```toml\n{steps['waiver']}```" in markdown
    changed = next(line for line in lines if line.startswith("changed: "))
    assert re.match(r"changed: variables\.NCCL_ALGO \(not set\) -> Tree; benchmark\.commit \w+ -> \w+", changed)


def test_the_page_is_there_and_the_commits_are_named(project: Project, red: Any) -> None:
    new, _, steps = red
    assert steps["page"] == f"{new}/report.html"
    assert (project.root / steps["page"]).is_file()
    assert project.good(steps["commits"]).endswith("Set NCCL_ALGO\n")


def test_the_point_can_be_reproduced(project: Project, red: Any) -> None:
    words = shlex.split(red[2]["reproduce"])
    assert words[:2] == ["mbridge", "run"]
    assert words[-2:] == ["--only", "llama3_8b/single"]
    words = words if "--only" in project.good("mbridge run --help") else words[:-2]
    done = project.good(shlex.join(["mbridge", "dry-run", *words[2:], "--output-dir", "results/dry"]))
    assert "5 runs accepted" in done


def test_the_waiver_is_accepted(project: Project, red: Any) -> None:
    new, _, steps = red
    policy = project.root / "ci" / "waived.toml"
    policy.write_text((project.root / steps["policy"]).read_text() + steps["waiver"])
    refused = project.run(f"mbridge gate {new} --policy ci/waived.toml")
    assert (refused.returncode, "is too short a reason" in " ".join(refused.stderr.split())) == (2, True)
    policy.write_text((project.root / steps["policy"]).read_text() + reasoned(steps["waiver"]))
    assert "waived: step_time_s of llama3_8b +" in project.good(f"mbridge gate {new} --policy ci/waived.toml")


def test_promotion_makes_the_gate_green(project: Project, red: Any) -> None:
    """Last of this project: it replaces the baseline. The command asks at the terminal."""
    steps = red[2]
    refused = project.run(steps["accept"])
    assert (refused.returncode, "--reason: is '<why>'" in refused.stderr) == (2, True)
    master, slave = pty.openpty()
    os.write(master, b"y\n")
    env = {**os.environ, **project.env}
    subprocess.run(
        ["sh", "-c", reasoned(steps["accept"])], cwd=project.root, env=env, stdin=slave, check=True, timeout=600
    )
    os.close(master)
    os.close(slave)
    assert "PASS" in project.good(f"mbridge gate {run(project, 'next')} --policy ci/policy.toml")


@pytest.fixture
def gate(mbridge: Any, tmp_path: Path) -> Any:
    """Judge a report against a baseline of five good runs; return the next steps."""
    (tmp_path / "policy.toml").write_text('name = "p"\nbaseline = "baseline.toml"\n')

    def judge(code: int, label: str = "p", **result: Any) -> dict[str, Any] | None:
        old, new = (
            make_report(tmp_path / "a.json", label=label),
            make_report(tmp_path / "b.json", label=label, **result),
        )
        promoted = mbridge(
            *("baseline", "promote", old, "--baseline", tmp_path / "baseline.toml", "--reason", "first", "--yes")
        )
        assert promoted.returncode == 0, promoted.stderr
        files = ("--json", tmp_path / "out.json", "--markdown", tmp_path / "out.md")
        done = mbridge("gate", new, "--policy", tmp_path / "policy.toml", *files)
        assert done.returncode == code, done.stdout + done.stderr
        steps: dict[str, Any] | None = json.loads((tmp_path / "out.json").read_text())["next_steps"]
        return steps

    return judge


def test_only_steps_that_exist_are_named(gate: Any) -> None:
    assert gate(0, seed=2) is None
    few = gate(10, level=1.3, seed=2, runs=3)
    assert (few["accept"], few["reproduce"], few["page"]) == ("", "", ""), "a report.json alone has no plan and no page"
    assert "3 of the 5 runs" in few["not_accepted"]
    assert few["waiver"]
    assert gate(10, level=8.5, seed=2)["not_waived"]


def test_a_report_without_runs_is_not_run(mbridge: Any, tmp_path: Path) -> None:
    """Only rejected points: there is nothing to reproduce or promote, and the verdict is shown all the same."""
    (tmp_path / "policy.toml").write_text('name = "p"\n[history]\nfile = "history.sqlite"\n')
    old = make_report(tmp_path / "a.json")
    assert mbridge("history", "import", old, "--history", tmp_path / "history.sqlite").returncode == 0
    report = json.loads(old.read_text())
    (tmp_path / "empty.json").write_text(json.dumps({**report, "points": []}))
    done = mbridge("gate", tmp_path / "empty.json", "--policy", tmp_path / "policy.toml")
    assert done.returncode == 11, done.stdout + done.stderr


def test_a_change_of_all_points_has_one_promotion_and_one_waiver_a_metric(mbridge: Any, tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(12)]
    old = write_points(tmp_path / "old.json", dict.fromkeys(names, 1.0), 100)
    new = write_points(tmp_path / "new.json", dict.fromkeys(names, 1.05), 200)
    policy, baseline = tmp_path / "policy.toml", tmp_path / "baseline.toml"
    policy.write_text('name = "p"\nbaseline = "baseline.toml"\nmax_noise = 0.05\n')
    promote = ("baseline", "promote", old, "--baseline", baseline, "--reason", "first", "--policy", policy, "--yes")
    assert mbridge(*promote).returncode == 0
    assert mbridge("gate", new, "--policy", policy, "--json", tmp_path / "out.json").returncode == 10
    steps = json.loads((tmp_path / "out.json").read_text())["next_steps"]
    assert steps["waiver"].count('point = "*"') == steps["waiver"].count("[[waivers]]")
    waived = tmp_path / "waived.toml"
    assert steps["waiver"].count("[[waivers]]") == 1, "one slowdown, averaged in two ways"
    waived.write_text(policy.read_text() + reasoned(steps["waiver"]))
    assert mbridge("gate", new, "--policy", waived).returncode == 0
    assert "--point" not in steps["accept"]
    assert mbridge(*shlex.split(reasoned(steps["accept"]))[1:], "--yes").returncode == 0


def test_hostile_names_stay_words_and_text(gate: Any, tmp_path: Path) -> None:
    steps = gate(10, label=HOSTILE, level=1.1, seed=2)
    assert "touch" not in steps["accept"], "the only point needs no name"
    policy = tmp_path / "policy.toml"
    policy.write_text(policy.read_text() + reasoned(steps["waiver"]))
    assert load_policy(policy).policy.waivers[0].point == f"t/{HOSTILE}"
    markdown = (tmp_path / "out.md").read_text()
    assert "````toml\n" in markdown, "the fence is longer than any in the text"


def test_a_terminal_gets_no_control_characters() -> None:
    assert "\x1b" not in "".join(render_next_steps(NextSteps("t/p", accept="mbridge '\x1b[31m'")))
