"""A repository of benchmarks with what `mbridge init ci` writes into it.

What a machine for tests lacks has a stand-in: the cluster of systems/h100.toml is this machine, and the training prints
steps of a known length.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SCENARIO = "--system-config systems/h100.toml --test-scenario conf/scenarios/nightly.toml --tests-dir test_defs"
SYSTEM = 'name = "h100"\nscheduler = "local"\nmonitor_interval = 0.2\npython_executable = "{trainer}"\n'
TRAINER = """#!{python}
import importlib.util, json, os, random, sys
spec = importlib.util.spec_from_file_location("stand_in", "{stand_in}")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
record, level = module.record, random.gauss(0.5, 0.001) * (1.2 if os.path.exists("{slow}") else 1)

if os.path.exists("{broken}"):
    sys.exit(1)

def noisy(step, says_s):
    step_time_s = level * random.gauss(1, 0.002)
    return {{**record(step, says_s), "step_time_s": step_time_s, "tflops_per_gpu": 200 / step_time_s}}

def say(mark, text, **options):
    more = {{"flops_formula": "megatron-bridge/new", "flops_per_step": 200e12}} if mark == "MBRIDGE_RUN" else {{}}
    print(mark, json.dumps({{**json.loads(text), **more}}), **options)

module.record, module.print = noisy, say
sys.exit(module.main())
"""


class Project:
    """A copy of what a user has checked out, with what `mbridge init ci` writes for its nightly scenario."""

    def __init__(self, root: Path) -> None:
        self.root, self.summary = root, root / "summary.md"
        self.env = {
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "BUILD_NUMBER": "7",
        }
        for name in ("conf", "systems", "test_defs"):
            shutil.copytree(REPOSITORY / name, root / name)
        trainer = root / "trainer.py"
        stand_in = REPOSITORY / "tests" / "stand_in" / "training.py"
        trainer.write_text(
            TRAINER.format(python=sys.executable, stand_in=stand_in, slow=root / "slow", broken=root / "broken")
        )
        trainer.chmod(0o755)
        self._install()
        self.good(f"mbridge init ci {SCENARIO} --github --gitlab --jenkins")
        (root / "systems" / "h100.toml").write_text(SYSTEM.format(trainer=trainer))

    def _install(self) -> None:
        """Put mbridge on the PATH, as the page asks of a runner."""
        command = self.root / "bin" / "mbridge"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cloudai_mbridge "$@"\n')
        command.chmod(0o755)

    def run(
        self, commands: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run commands as a CI does, which stops at the first that fails. cwd: default: the project."""
        done = subprocess.run(
            ["sh", "-e", "-c", commands],
            cwd=cwd or self.root,
            env={**os.environ, **self.env, **(env or {})},
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
