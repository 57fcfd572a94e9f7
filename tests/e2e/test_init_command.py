"""`mbridge init` and `init ci`: what they write runs as it is, nothing is overwritten, and no baseline is no pass."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from cloudai_mbridge.cli import cli
from tests.cases import every
from tests.golden import Sentence
from tests.sandbox import SlurmSandbox

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
FILES = ("system.toml", "scenario.toml", "test_defs/gpt_tiny.toml")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def next_command(printed: str, name: str) -> list[str]:
    """Return the arguments of a command that was printed as the next one."""
    found = re.search(rf"^ *mbridge ({name}\b[^#\n]*)", printed, re.MULTILINE)
    assert found, printed
    return shlex.split(found[1])


def good(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@every("directory", [".", "a bench/deep"])
@every("options", [(), ("--recipe", "moe_tiny"), ("--recipe", "llama3_8b", "--gpu", "h100")])
def test_what_is_written_passes_the_checks(
    mbridge: Any, tmp_path: Path, directory: str, options: tuple[str, ...]
) -> None:
    printed = good(mbridge("init", directory, "--local", *options, cwd=tmp_path))
    found = good(mbridge("verify-configs", directory, "--system-config", f"{directory}/system.toml", cwd=tmp_path))
    assert found.count("ok ") == len(list(tmp_path.rglob("*.toml"))) == 3
    assert "1 point, 0 of them rejected" in found
    run = next_command(printed, "run")
    assert good(mbridge("dry-run", *run[1:], cwd=tmp_path)).count("accepted ") >= 5
    ci = next_command(printed, "init ci")
    good(mbridge(*ci, cwd=tmp_path))
    assert shlex.split((tmp_path / "ci/performance.sh").read_text().partition("mbridge run ")[2])[:6] == run[1:]


def test_editors_find_the_schemas(mbridge: Any, tmp_path: Path) -> None:
    good(mbridge("init", "--local", cwd=tmp_path))
    good(mbridge("init", "ci", cwd=tmp_path))
    for path in (*map(Path, FILES), Path("ci/policy.toml")):
        first = (tmp_path / path).read_text().splitlines()[0]
        schema = (tmp_path / path).parent / first.removeprefix("#:schema ")
        Draft7Validator(json.loads(schema.read_text())).validate(tomllib.loads((tmp_path / path).read_text()))


def test_every_key_is_explained(mbridge: Any, tmp_path: Path) -> None:
    good(mbridge("init", "--local", cwd=tmp_path))
    lines = [line for name in FILES for line in (tmp_path / name).read_text().splitlines() if " = " in line]
    assert [line for line in lines if "  # " not in line] == ['model_family_name = "tiny"']


def test_the_next_command_is_short_where_the_defaults_are_right(mbridge: Any, tmp_path: Path) -> None:
    assert next_command(good(mbridge("init", "--local", cwd=tmp_path)), "init ci") == ["init", "ci"]


def test_git_ignores_the_results(mbridge: Any, tmp_path: Path) -> None:
    """Once, below what the file has already, and nowhere but in a repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    here = tmp_path / "bench"
    here.mkdir()
    (here / ".gitignore").write_bytes(b"caf\xe9")
    for _ in range(2):
        good(mbridge("init", "--local", "--force", cwd=here))
    assert (here / ".gitignore").read_bytes() == b"caf\xe9\nresults/\n"
    (here / "results").mkdir()
    (here / "results" / "report.json").touch()
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert "results/" not in subprocess.run(status, cwd=here, capture_output=True, text=True, check=True).stdout


def test_nothing_is_overwritten(mbridge: Any, tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "scenario.toml").write_text("mine")
    (tmp_path / "system.toml").symlink_to("nowhere")
    done = mbridge("init", "--local", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "system.toml" in done.stderr
    sentence(done.stderr)
    assert contents(tmp_path) == {"scenario.toml": b"mine"}
    good(mbridge("init", "--local", "--force", cwd=tmp_path))
    before = contents(tmp_path)
    assert good(mbridge("init", "--local", cwd=tmp_path)).count("unchanged: ") == len(before) == 6


def test_a_baseline_is_never_overwritten(mbridge: Any, tmp_path: Path) -> None:
    good(mbridge("init", "--local", cwd=tmp_path))
    good(mbridge("init", "ci", cwd=tmp_path))
    assert "written: Jenkinsfile" in good(mbridge("init", "ci", "--jenkins", cwd=tmp_path))
    (tmp_path / "ci/baseline.toml").write_text("version = 1\n")
    (tmp_path / "ci/policy.toml").write_text("mine")
    before = contents(tmp_path)
    done = mbridge("init", "ci", "--github", cwd=tmp_path)
    assert (done.returncode, "ci/policy.toml: exists already; nothing was written" in done.stderr) == (2, True)
    assert contents(tmp_path) == before
    assert "kept: ci/baseline.toml" in good(mbridge("init", "ci", "--force", cwd=tmp_path))
    changed = {name for name, text in contents(tmp_path).items() if before[name] != text}
    assert changed == {"ci/policy.toml"}


@every(
    "options",
    [
        ("--local", "--partition", "p"),
        ("--local", "--recipe", "gpt_tyni"),
        ("--local", "--gpu", "v100"),
        ("--local", "--gpu", "h100", "--recipe", "llama3_70b"),
        ("--local", "--recipe", "deepseek_v4_flash"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    mbridge: Any, tmp_path: Path, sentence: Sentence, options: tuple[str, ...]
) -> None:
    done = mbridge("init", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    sentence(done.stderr)
    assert not contents(tmp_path)


def test_what_is_in_the_way(mbridge: Any, tmp_path: Path) -> None:
    done = mbridge("init", "ci", cwd=tmp_path)
    assert (done.returncode, "system.toml: no such file; write one with `mbridge init`" in done.stderr) == (2, True)
    (tmp_path / "test_defs").touch()
    done = mbridge("init", "--local", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: test_defs: is not a directory; move what is there, or write elsewhere\n",
    )
    assert list(contents(tmp_path)) == ["test_defs"]


def test_a_directory_may_be_called_like_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["init", "./ci", "--local"]).exit_code == 0
    assert (tmp_path / "ci" / "system.toml").is_file()


@pytest.mark.slurm
def test_a_slurm_cluster(mbridge: Any, cluster: SlurmSandbox, tmp_path: Path) -> None:
    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        done: subprocess.CompletedProcess[str] = mbridge(*arguments, cwd=tmp_path, env=cluster.env)
        return done

    printed = good(call("init", "--slurm", "--nodes", "2", "--recipe", "gpt_tiny"))
    system, test = (tomllib.loads((tmp_path / FILES[i]).read_text()) for i in (0, 2))
    assert (system["default_partition"], system["gpus_per_node"], system["gpu_type"]) == ("main", 4, "gb200")
    assert system["partitions"][0]["groups"][0]["nodes"] == ["gb200-[1-2]"]
    assert "global_env_vars" not in system  # what a recipe needs, it sets itself
    assert test["cmd_args"]["num_gpus"] == 8
    run = next_command(printed, "run")
    assert good(call("dry-run", *run[1:])).count("8 ranks on 2 nodes") == 5
    hint = '# python_executable = "/shared/venv/bin/python"'
    text = (tmp_path / "system.toml").read_text()
    assert hint in text
    (tmp_path / "system.toml").write_text(text.replace(hint, f'python_executable = "{STAND_IN}"'))
    assert "5 success" in good(call(*run))

    done = call("init", "other", "--slurm", "--partition", "large")
    assert (done.returncode, "Slurm has no partition 'large'; use one of main" in done.stderr) == (2, True)
    done = call("init", "other", "--slurm", "--nodes", "3")
    assert (done.returncode, "3 is more than the 2 of partition 'main'" in done.stderr) == (2, True)
    assert not (tmp_path / "other").exists()


def test_no_slurm_is_one_line(mbridge: Any, tmp_path: Path) -> None:
    done = mbridge("init", "--slurm", cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (3, "error: sinfo is not installed here; run on a Slurm login node\n")


@pytest.mark.long
def test_from_nothing_to_a_green_gate(mbridge: Any, tmp_path: Path) -> None:
    """Three commands, real training: green without a baseline, promoted, green with it, red when it is gone.

    This machine may have become several times slower between the two runs, which would rightly be red, so the step time
    is left out of the policy here: the loss curve decides.
    """
    pytest.importorskip("torch")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mbridge"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cloudai_mbridge "$@"\n')
    program.chmod(0o755)
    repository = tmp_path / "repository"
    repository.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(STAND_IN.parents[2]),
    }

    def shell(command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            shell=True,
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )

    good(shell("git init --quiet . && mbridge init --local && mbridge init ci --github"))
    policy = repository / "ci" / "policy.toml"
    text, timed = re.subn(r'\[\[metrics\]\]\nname = "step_time_s"\n.*', "", policy.read_text(), flags=re.DOTALL)
    assert (timed, text.count("[[metrics]]")) == (1, 1)
    policy.write_text(text)
    first = good(shell("sh ci/performance.sh first"))
    assert "exit code 17" in first
    promote = re.findall(r"make the first of good runs with: (mbridge baseline promote .*)", first)
    assert len(promote) == 1
    good(shell(f"{promote[0]} --yes"))
    assert "exit code 0" in good(shell("sh ci/performance.sh second"))

    again = shell("sh ci/performance.sh second")
    assert (again.returncode, again.stderr) == (2, "results/second exists already; give another name\n")
    (repository / "ci/baseline.toml").unlink()
    gone = shell("mbridge gate results/second/*/ --policy ci/policy.toml")
    assert (gone.returncode, "there is no baseline yet" in gone.stderr) == (2, True)
