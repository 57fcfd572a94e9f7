"""Options that change what the commands take, and commands that have nothing to do."""

from pathlib import Path
from typing import Any

import pytest

SCENARIO = """
name = "u"
[[Tests]]
id = "u"
name = "u"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
num_gpus = 1
max_step = 12
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "system.toml").write_text('name = "l"\nscheduler = "local"\ninstall_path = "installed"\n')
    (tmp_path / "s.toml").write_text(SCENARIO)
    return [f"--system-config={tmp_path}/system.toml", f"--test-scenario={tmp_path}/s.toml"]


@pytest.mark.parametrize("command", [["dry-run"], ["sweep", "plan"]])
def test_unknown_arguments_are_an_error_or_a_warning(
    command: list[str], files: list[str], mbridge: Any, tmp_path: Path
) -> None:
    out = [f"--output-dir={tmp_path}/out"] if command == ["dry-run"] else []
    refused = mbridge(*command, *files, *out)
    assert refused.returncode == 2
    assert "s.toml:12: Tests[0].cmd_args.max_step: unknown key; did you mean 'max_steps'" in refused.stderr
    taken = mbridge(*command, "--allow-unknown-args", *files, *out)
    assert taken.returncode == 0, taken.stderr
    assert taken.stderr.startswith("warning: ")
    assert "max_step: unknown key, left out; did you mean 'max_steps'" in taken.stderr


def test_verify_takes_them_too(mbridge: Any, files: list[str], tmp_path: Path) -> None:
    assert mbridge("verify-configs", tmp_path / "s.toml").returncode == 2
    assert mbridge("verify-configs", "--allow-unknown-args", tmp_path / "s.toml").returncode == 0


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_embedded_tests_need_nothing_installed(command: str, files: list[str], mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.replace("max_step ", "max_steps "))
    done = mbridge(command, *files)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "installed/gpt_tiny").exists()
