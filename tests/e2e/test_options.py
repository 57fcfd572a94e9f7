"""Options that change what the commands take, and commands that have nothing to do."""

from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

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
    sentence: Sentence, command: list[str], files: list[str], mbridge: Any, tmp_path: Path
) -> None:
    out = [f"--output-dir={tmp_path}/out"] if command == ["dry-run"] else []
    refused = mbridge(*command, *files, *out)
    assert refused.returncode == 2
    assert "s.toml:12: Tests[0].cmd_args.max_step:" in refused.stderr
    sentence(refused.stderr)
    taken = mbridge(*command, "--allow-unknown-args", *files, *out)
    assert taken.returncode == 0, taken.stderr
    assert taken.stderr.startswith("warning: ")
    assert "max_step:" in taken.stderr
    sentence(taken.stderr)


def test_verify_takes_them_too(mbridge: Any, files: list[str], tmp_path: Path) -> None:
    assert mbridge("verify-configs", tmp_path / "s.toml").returncode == 2
    assert mbridge("verify-configs", "--allow-unknown-args", tmp_path / "s.toml").returncode == 0


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_embedded_tests_need_nothing_installed(command: str, files: list[str], mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.replace("max_step ", "max_steps "))
    done = mbridge(command, *files)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "installed/gpt_tiny").exists()


# Options of CloudAI's command line


def test_cloudais_options_are_taken(files: list[str], mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.replace("max_step ", "max_steps "))
    (tmp_path / "hook").mkdir()
    options = ["--single-sbatch", "--enable-cache-without-check", f"--hook-dir={tmp_path}/hook"]
    before = ["--log-level", "debug", "--log-file", "debug.log"]
    done = mbridge(*before, "dry-run", *files[1:], *options, f"--output-dir={tmp_path}/out", env=_system(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("note: ") for line in lines)
    assert not Path("debug.log").exists()


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_cloudais_options_of_install(command: str, files: list[str], mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.replace("max_step ", "max_steps "))
    done = mbridge(command, *files[1:], f"--hook-dir={tmp_path}", env=_system(tmp_path))
    assert done.returncode == 0, done.stderr


def _system(directory: Path) -> dict[str, str]:
    return {"CLOUDAI_SYSTEM_CONFIG": str(directory / "system.toml")}


def test_what_cloudai_lists(mbridge: Any) -> None:
    assert mbridge("list", "agents").stdout.startswith("grid_search: ")
    assert "report.json" in mbridge("list", "reports", "-v").stdout
    assert mbridge("list", "-h").stdout.startswith("Usage: ")


def test_files_of_other_templates_are_summed_up(mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\ntest_template_name = "NcclTest"\n')
    (tmp_path / "b.toml").write_text('name = "b"\ntest_template_name = "Sleep"\n')
    (tmp_path / "s.toml").write_text('name = "s"\n[[Tests]]\nid = "a"\ntest_name = "a"\n')
    (tmp_path / "k.toml").write_text('name = "k"\nscheduler = "kubernetes"\n')
    done = mbridge("verify-configs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "skipped (not MegatronBridge): 2 tests of NcclTest, Sleep",
        "skipped (not MegatronBridge): 1 system of kubernetes",
        "skipped (not MegatronBridge): 1 scenario of NcclTest",
    ]
