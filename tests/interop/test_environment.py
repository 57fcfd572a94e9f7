"""The environment of `make interop` holds the real things, and they run."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
POINT = shlex.split("-a account -p partition -m llama -mr llama3_8b -ng 8 -gn 8 -g h100 -c bf16 -ms 10 -i image")


def test_cloudai_is_the_given_one(cloudai_source: Path) -> None:
    import cloudai

    installed = Path(cloudai.__file__).parent
    for name in ("registration.py", "core.py", "cli/cli.py"):
        assert (installed / name).read_text() == (cloudai_source / "src/cloudai" / name).read_text()


@pytest.mark.parametrize("launcher", ["launcher_0_3", "launcher_0_6"])
def test_the_launcher_s_dry_run(launcher: str, launch: Launch, request: pytest.FixtureRequest) -> None:
    result = launch(request.getfixturevalue(launcher), *POINT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "sbatch" in result.stdout + result.stderr
