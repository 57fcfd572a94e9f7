"""docs/ci.md, followed from top to bottom: its script and its commands are taken from the page and run.

What a machine for tests lacks has a stand-in: the cluster of systems/h100.toml is this machine, and the training prints
steps of a known length.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "ci.md"
INSTALL = "python3 -m venv .venv && .venv/bin/pip install ."
SYSTEM = 'name = "h100"\nscheduler = "local"\nmonitor_interval = 0.2\npython_executable = "{trainer}"\n'
TRAINER = """#!{python}
import importlib.util, json, os, random, sys
spec = importlib.util.spec_from_file_location("stand_in", "{stand_in}")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
record, level = module.record, random.gauss(0.5, 0.001) * (1.2 if os.path.exists("{slow}") else 1)

def noisy(step, says_s):
    step_time_s = level * random.gauss(1, 0.002)
    return {{**record(step, says_s), "step_time_s": step_time_s, "tflops_per_gpu": 200 / step_time_s}}

def say(mark, text, **options):
    more = {{"flops_formula": "megatron-bridge/new", "flops_per_step": 200e12}} if mark == "MBRIDGE_RUN" else {{}}
    print(mark, json.dumps({{**json.loads(text), **more}}), **options)

module.record, module.print = noisy, say
sys.exit(module.main())
"""


def fences() -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every fenced block of the page."""
    for token in MarkdownIt().parse(PAGE.read_text()):
        if token.type == "fence":
            yield token.info, token.content


def blocks(language: str) -> list[str]:
    return [text for info, text in fences() if info == language]


class Project:
    """A copy of what a user has checked out, with the page's script saved where the page says."""

    def __init__(self, root: Path) -> None:
        self.root, self.summary = root, root / "summary.md"
        for name in ("conf", "systems", "test_defs"):
            shutil.copytree(REPOSITORY / name, root / name)
        trainer = root / "trainer.py"
        stand_in = REPOSITORY / "tests" / "stand_in" / "training.py"
        trainer.write_text(TRAINER.format(python=sys.executable, stand_in=stand_in, slow=root / "slow"))
        trainer.chmod(0o755)
        (root / "systems" / "h100.toml").write_text(SYSTEM.format(trainer=trainer))
        self._install()
        script, *self.shell = blocks("sh")
        named = re.match(r"#!/bin/sh\n# (ci/[\w.]+) ", script)
        assert named, "the page names the file of its script"
        (root / named[1]).parent.mkdir()
        (root / named[1]).write_text(script)

    def _install(self) -> None:
        """Do what the page's installation does, without a network."""
        command = self.root / ".venv" / "bin" / "mbridge"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cloudai_mbridge "$@"\n')
        command.chmod(0o755)

    def run(self, commands: str) -> "subprocess.CompletedProcess[str]":
        """Run commands as a CI does, which stops at the first that fails."""
        path = f"{self.root / '.venv' / 'bin'}:{os.environ['PATH']}"
        more = {
            "PATH": path,
            "PYTHONPATH": str(REPOSITORY),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "BUILD_NUMBER": "7",
        }
        done = subprocess.run(
            ["sh", "-e", "-c", commands.replace(INSTALL, "true")],
            cwd=self.root,
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def good(self, commands: str) -> str:
        done = self.run(commands)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("ci"))


def test_every_file_that_the_page_names_is_there() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"\b(?:conf|systems|test_defs)/[\w/.-]+\.toml", text)) - {"conf/baselines/default.toml"}
    assert len(named) >= 4
    assert not [name for name in named if not (REPOSITORY / name).exists()]
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert not [link for link in links if not (PAGE.parent / link).exists()]


@pytest.mark.long
def test_the_page_can_be_followed(project: Project) -> None:
    first, jenkins = project.shell
    early = project.run("sh ci/performance.sh early")
    assert early.returncode == 2
    assert "there is no baseline yet" in early.stderr
    assert "mbridge baseline promote results/early/nightly_" in early.stderr

    assert "conf/baselines/default.toml: 1 points" in project.good(first)
    assert (project.root / "conf/baselines/default.toml").is_file()

    github, gitlab = map(yaml.safe_load, blocks("yaml"))
    steps = [step["run"] for step in github["jobs"]["nightly"]["steps"] if "run" in step]
    for commands in (*steps, *gitlab["performance"]["script"], jenkins):
        project.good(commands)
    assert "pass" in project.summary.read_text()
    uploaded = github["jobs"]["nightly"]["steps"][-1]["with"]["path"].split()
    kept = gitlab["performance"]["artifacts"]
    for pattern in (*uploaded, *kept["paths"], *kept["reports"]["junit"], "results/7/gate.xml"):
        assert list(project.root.glob(pattern)), f"{pattern} names nothing"

    (project.root / "slow").touch()
    assert project.run("sh ci/performance.sh slow").returncode == 10
    assert "regression" in (project.root / "results/slow/gate.md").read_text()


def test_the_table_has_every_exit_code_of_the_gate() -> None:
    from cloudai_mbridge.gate.compare.verdict import EXIT_CODES, IMPROVEMENT_EXIT_CODE

    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert listed == {2, 3, IMPROVEMENT_EXIT_CODE, *EXIT_CODES.values()}
