"""The two commands: options, exit codes, what they say, and what they do not."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cloudai_mbridge.cli import cli
from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.megatron_bridge.release import repo_path, venv_path

pytestmark = pytest.mark.process

Repo = Any  # of conftest.py

TEST = """\
name = "{name}"
description = "d"
test_template_name = "MegatronBridge"
[nemo_run_repo]
url = "{run}"
commit = "main"
[[git_repos]]
url = "{bridge}"
commit = "{commit}"
mount_as = "/opt/Megatron-Bridge"
[cmd_args]
model_family_name = "f"
model_recipe_name = "r"
hf_token = "hf-hunter2"
wandb_key = "wb-hunter2"
{args}
"""
SYSTEM = 'name = "s"\nscheduler = "standalone"\n'
SCENARIO = 'name = "s"\n[[Tests]]\nid = "1"\ntest_name = "one"\n'


@pytest.fixture
def case(tmp_path: Path, repo: Repo, make_repo: Callable[[str], Repo]) -> Callable[..., list[str]]:
    """Write the files of a case and return the options that name them."""
    bridge = make_repo("Bridge")

    def write(system: str = "", scenario: bool = True, args: str = "", commit: str = "v1", **more: str) -> list[str]:
        tests = tmp_path / "tests"
        tests.mkdir(exist_ok=True)
        install_path = system or f'install_path = "{tmp_path}/install"'
        (tmp_path / "system.toml").write_text(f"{SYSTEM}{install_path}\n")
        (tmp_path / "scenario.toml").write_text(SCENARIO)
        for name, args_of in {"one": args, **more}.items():
            urls = {"run": repo.url, "bridge": bridge.url}
            (tests / f"{name}.toml").write_text(TEST.format(name=name, args=args_of, commit=commit, **urls))
        (tests / "nccl.toml").write_text('name = "nccl"\ntest_template_name = "NcclTest"\n')
        options = [f"--system-config={tmp_path}/system.toml", f"--tests-dir={tests}"]
        return [*options, f"--test-scenario={tmp_path}/scenario.toml"] if scenario else options

    return write


def mbridge(*args: str) -> Result:
    return CliRunner().invoke(cli, args, standalone_mode=False)


def test_install_and_uninstall_for_a_scenario(case: Callable[..., list[str]], repo: Repo, tmp_path: Path) -> None:
    options = [*case(), f"--output-dir={tmp_path}/ignored"]
    done = mbridge("install", *options)
    assert done.exception is None, done.output
    assert done.return_value == 0
    assert (venv_path(tmp_path / "install", repo.url, "main") / "bin" / "stand_in").exists()
    clone = repo_path(tmp_path / "install", repo.url, "main")
    assert f"repository {repo.url} at main: installed in {clone}" in done.output
    assert "hunter2" not in done.output
    markers = [path.read_text() for path in (tmp_path / "install").rglob(".mbridge-install.json")]
    assert len(markers) == 3
    assert "hunter2" not in "".join(markers)
    assert mbridge("uninstall", *options).return_value == 0
    assert [path.name for path in (tmp_path / "install").iterdir()] == [".mbridge-install.lock"]
    assert not (tmp_path / "ignored").exists()


def test_without_a_scenario_all_our_tests_of_the_directory_count(case: Callable[..., list[str]]) -> None:
    options = case(scenario=False, two='container_image = "-x"')
    done = mbridge("install", *options)
    assert isinstance(done.exception, BadInput)
    assert "test 'two': cmd_args.container_image: '-x' is not an image" in str(done.exception)


def test_failure_is_a_tool_failure_with_one_line_each(case: Callable[..., list[str]]) -> None:
    done = mbridge("install", *case(commit="none"))
    assert isinstance(done.exception, ToolFailure)
    assert len(str(done.exception).splitlines()) == 1
    assert "couldn't find remote ref none" in str(done.exception)


def test_what_cannot_be_installed_is_bad_input(case: Callable[..., list[str]]) -> None:
    for system in ("# no install_path", "install_path = ''", "install_path = '~no-such-user/i'"):
        for command in ("install", "uninstall"):
            done = mbridge(command, *case(system=system))
            assert isinstance(done.exception, BadInput)
            assert "install_path" in str(done.exception)
    done = mbridge("install", case()[0])
    assert isinstance(done.exception, BadInput)
    assert "give --tests-dir or --test-scenario" in str(done.exception)


def test_embedded_tests_need_nothing(case: Callable[..., list[str]]) -> None:
    done = mbridge("install", *case(args='launcher = "embedded"'))
    assert done.return_value == 0
    assert done.output == "nothing to install: no test uses launcher = 'megatron_bridge'\n"


def test_packages_beside_nemo_run_come_from_the_environment(
    case: Callable[..., list[str]], repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_package: Any
) -> None:
    monkeypatch.setenv("MBRIDGE_NEMO_RUN_PACKAGES", f"{make_package('one')}  {make_package('two')}")
    assert mbridge("install", *case()).return_value == 0
    programs = venv_path(tmp_path / "install", repo.url, "main") / "bin"
    assert (programs / "one").exists()
    assert (programs / "two").exists()


MAIN = """\
import signal, sys, click
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.cli import cli
try:
    cli.main(sys.argv[1:], standalone_mode=False)
except MBridgeError as error:
    print(error)
    sys.exit(error.exit_code)
except click.Abort:
    sys.exit(130)
"""
SLOW_GIT = """\
#!/bin/sh
# A fake: hangs, and leaves a child that hangs too
sleep 600 &
echo $$ $! > {pids}
wait
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_tool_and_removes_unfinished_work(
    case: Callable[..., list[str]],
    fake_command: Callable[[str, str], Path],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    options, pids = case(), tmp_path / "pids"
    fake_command("git", SLOW_GIT.format(pids=pids))
    process = subprocess.Popen([sys.executable, "-c", MAIN, "install", *options], stdout=subprocess.DEVNULL)
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=1500) == code
    assert [path.name for path in (tmp_path / "install").iterdir()] == [".mbridge-install.lock"]
    end = time.monotonic() + 60  # a killed process ends a little later than its killer
    while (left := [pid for pid in pids.read_text().split() if _is_alive(int(pid))]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


def _is_alive(pid: int) -> bool:
    """Return whether the process runs; a killed one may be left for init to collect."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
