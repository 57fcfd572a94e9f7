"""Options and values that the pinned release's launcher lacks are refused before anything is written."""

from pathlib import Path
from typing import Any

import pytest

from tests.cases import every

pytestmark = pytest.mark.process

TEST = """
name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
[[Tests.git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "{commit}"
[Tests.cmd_args]
model_family_name = "qwen"
model_recipe_name = "some"
{args}
"""
SYSTEM = """
name = "c"
scheduler = "slurm"
install_path = "/inst"
default_partition = "main"
[[partitions]]
name = "main"
"""


def _dry_run(mbridge: Any, directory: Path, commit: str, args: str) -> Any:
    (directory / "s.toml").write_text(TEST.format(commit=commit, args=args))
    (directory / "system.toml").write_text(SYSTEM)
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/s.toml"]
    return mbridge("dry-run", *files, f"--output-dir={directory}/out")


def test_every_problem_is_said_and_nothing_is_written(tmp_path: Path, mbridge: Any) -> None:
    done = _dry_run(mbridge, tmp_path, "v0.3.0", 'gpu_type = ["h100", "vr200"]\noffline = true')
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: test 't': cmd_args.offline: the launcher of Megatron-Bridge 0.3.0 has no such option;"
        " remove it, or pin a release that has it: 0.4.0 or later",
        "error: test 't': cmd_args.gpu_type: 'vr200' is unknown to the launcher of Megatron-Bridge 0.3.0; use one of"
        " h100, b200, gb200, gb300, b300; or pin a release that knows it: 0.4.0 or later",
    ]
    assert not (tmp_path / "out").exists()


def test_verify_configs_says_so_too(tmp_path: Path, mbridge: Any) -> None:
    args = 'gpu_type = ["h100", "vr200"]\noffline = [true, false]\nmb = [1, 2, 3]'
    (tmp_path / "s.toml").write_text(TEST.format(commit="v0.3.0", args=args))
    done = mbridge("verify-configs", tmp_path)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {tmp_path}/s.toml: test 't': cmd_args.offline: the launcher")
    assert second.startswith(f"error: {tmp_path}/s.toml: test 't': cmd_args.gpu_type: 'vr200' is unknown")
    (tmp_path / "s.toml").write_text(TEST.format(commit="v0.6.0", args=args))
    assert mbridge("verify-configs", tmp_path).returncode == 0


@every("commit", ["v0.6.0", "main", "1234abcd"])
def test_a_newer_or_an_unknown_release_is_not_refused(tmp_path: Path, mbridge: Any, commit: str) -> None:
    done = _dry_run(mbridge, tmp_path, commit, 'gpu_type = "vr200"\noffline = true\ndeterministic = true')
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "out").rglob("launcher.sh")
    assert "--offline" in script.read_text()
    assert "-hf" not in script.read_text()
    assert (script.parent / "start_launcher.py").exists()
