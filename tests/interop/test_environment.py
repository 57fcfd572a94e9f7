"""The environment of `make interop` holds the real things, and they run."""

import shlex
import subprocess
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
POINT = shlex.split("-a account -p partition -m llama -mr llama3_8b -ng 8 -gn 8 -g h100 -c bf16 -ms 10 -i image")


def test_cloudai_is_the_given_one_and_has_what_it_requires(cloudai_source: Path) -> None:
    import cloudai

    assert Path(cloudai.__file__).parent == cloudai_source / "src/cloudai"
    required = tomllib.loads((cloudai_source / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in map(Requirement, required):
        if requirement.marker is None or requirement.marker.evaluate():
            assert version(requirement.name) in requirement.specifier, requirement


@pytest.mark.parametrize("launcher", ["launcher_0_3", "launcher_0_6"])
def test_the_launcher_s_dry_run(launcher: str, launch: Launch, request: pytest.FixtureRequest) -> None:
    result = launch(request.getfixturevalue(launcher), *POINT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "sbatch" in result.stdout + result.stderr
