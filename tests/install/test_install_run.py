"""All that tests need at once: failures, kills, foreign files, two installers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.install.run import install_all, installables_of, uninstall_all
from cloudai_mbridge.megatron_bridge.release import image_path, repo_path, venv_path
from cloudai_mbridge.models.test_definition import TestDefinition
from tests.golden import Sentence

pytestmark = pytest.mark.process

Repo = Any  # of conftest.py
MakeTest = Callable[..., TestDefinition]
IMAGE = "nvcr.io#nvidia/nemo:26.02.00"

INSTALL = """\
import sys
from pathlib import Path
from cloudai_mbridge.install.run import install_all
from cloudai_mbridge.models.test_definition import TestDefinition

definition = TestDefinition.model_validate_json(sys.argv[1])
failures = install_all([definition], Path(sys.argv[2]), lambda line: print(line, flush=True), packages=())
sys.exit("; ".join(failures) or 0)
"""


def start(definition: TestDefinition, root: Path) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", INSTALL, definition.model_dump_json(exclude_defaults=True), str(root)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def snapshot(root: Path) -> dict[Path, tuple[int, int]]:
    """Return inode and time of everything below, but for the byte code that Python may write at any time."""
    found = [path for path in root.rglob("*") if "__pycache__" not in path.parts]
    return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in found}


def is_everything_installed(test: TestDefinition, root: Path) -> bool:
    return all(item.is_installed(item.place(root)) for item in installables_of([test], packages=()))


def hidden(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name.startswith(".")}


def test_install_again_uninstall(
    make_repo: Callable[[str], Repo], make_test: MakeTest, enroot_calls: Callable[[], list[Any]], tmp_path: Path
) -> None:
    run, bridge, root, said = make_repo("Run"), make_repo("Megatron-Bridge"), tmp_path / "deep" / "install", list[str]()
    test = make_test(run, {"url": bridge.url, "commit": bridge.commits[1]}, image=IMAGE)
    assert not is_everything_installed(test, root)
    failures = install_all([test, test], root, said.append, packages=())
    assert not failures
    assert (repo_path(root, bridge.url, bridge.commits[1]) / "file.txt").read_text() == "two"
    assert (venv_path(root, run.url, "main") / "bin" / "stand_in").exists()
    assert image_path(root, IMAGE).read_bytes() == b"hsqs"
    assert is_everything_installed(test, root)

    before, said[:] = snapshot(root), []
    assert not install_all([test], root, said.append, packages=())
    assert snapshot(root) == before
    assert len(enroot_calls()) == 1
    assert [line.rpartition(": ")[2] for line in said] == ["already installed"] * 4

    (root / "foreign").mkdir()
    (root / "foreign" / "work").write_text("weeks of it")
    assert not uninstall_all([test], root, said.append, packages=())
    assert {path.name for path in root.iterdir()} == {"foreign", ".mbridge-install.lock"}
    assert (root / "foreign" / "work").exists()
    assert not uninstall_all([test], root, said.append, packages=())
    assert said[-1].endswith("not installed")


def test_one_failure_does_not_stop_the_others(
    make_repo: Callable[[str], Repo], make_test: MakeTest, enroot_calls: Callable[[], list[Any]], tmp_path: Path
) -> None:
    run, bridge, said = make_repo("Run"), make_repo("Megatron-Bridge"), list[str]()
    (run.directory / "backend.py").write_text("raise RuntimeError('no wheel today')\n")
    run.commit("broken")
    (tmp_path / "enroot.log.fail").touch()
    repos = [{"url": bridge.url, "commit": "none"}, {"url": bridge.url, "commit": "v1"}]
    failures = install_all([make_test(run, *repos, image=IMAGE)], tmp_path / "i", said.append, packages=())
    assert failures
    image, env, gone = failures
    assert image.startswith(f"image {IMAGE}: enroot failed")
    assert "401 Unauthorized" in image
    assert env.startswith(f"Python environment of {run.url} at main: python failed")
    assert "no wheel today" in env
    assert "couldn't find remote ref none" in gone
    assert not any("\n" in line for line in failures)
    assert repo_path(tmp_path / "i", bridge.url, "v1").is_dir()
    assert len([line for line in said if line.endswith(": failed")]) == 3


def test_foreign_directory_at_the_place_is_moved_aside_and_never_removed(
    make_repo: Callable[[str], Repo], make_test: MakeTest, tmp_path: Path
) -> None:
    run, bridge, root, said = make_repo("Run"), make_repo("Bridge"), tmp_path / "install", list[str]()
    test = make_test(run, {"url": bridge.url, "commit": "v1"})
    half = repo_path(root, bridge.url, "v1")
    (half / ".git").mkdir(parents=True)
    (half / "work").write_text("weeks of it")
    assert not uninstall_all([test], root, said.append, packages=())
    assert said[-1] == f"repository {bridge.url} at v1: {half} was not installed by mbridge; left as it is"
    assert not install_all([test], root, said.append, packages=())
    assert (half / "file.txt").read_text() == "one"
    assert half.with_name(f"{half.name}.set-aside-1").joinpath("work").read_text() == "weeks of it"
    assert is_everything_installed(test, root)


SLOW_GIT = """\
#!/bin/sh
# A fake: hangs in a fetch, with half of it on disk
case "$1" in
fetch) echo half > .git/objects/half; echo $$ > {pid}; exec sleep 600;;
esac
exec {git} "$@"
"""


def test_install_that_was_killed_is_repaired(
    repo: Repo, make_test: MakeTest, fake_command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    root, pid, test = tmp_path / "install", tmp_path / "pid", make_test(repo)
    git = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    slow = fake_command("git", SLOW_GIT.format(pid=pid, git=git))
    process = start(test, root)
    while not pid.exists() or not pid.read_text().strip():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    slow.unlink()
    assert len([name for name in hidden(root) if name.startswith(".mbridge-partial-")]) == 1
    assert not is_everything_installed(test, root)
    assert not install_all([test], root, print, packages=())
    assert is_everything_installed(test, root)
    assert hidden(root) == {".mbridge-install.lock"}


COUNTING_GIT = """\
#!/bin/sh
# A fake: counts, then is git
[ "$1" = fetch ] && echo fetch >> {log}
exec {git} "$@"
"""


def test_two_installers_at_once_do_the_work_once(
    repo: Repo, make_test: MakeTest, fake_command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    root, log, test = tmp_path / "install", tmp_path / "fetches", make_test(repo)
    git = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    fake_command("git", COUNTING_GIT.format(log=log, git=git))
    processes = [start(test, root) for _ in range(3)]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert log.read_text().splitlines() == ["fetch"]
    assert sum("waiting for another install" in output for output in outputs) == 2
    assert is_everything_installed(test, root)
    assert hidden(root) == {".mbridge-install.lock"}


def test_two_things_with_one_place_are_refused(
    make_repo: Callable[[str], Repo],
    make_test: MakeTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sentence: Sentence,
) -> None:
    one, other = make_repo("one"), make_repo("other")
    monkeypatch.setattr("cloudai_mbridge.install.installables.repo_path", lambda path, url, commit: path / "same")
    test = make_test(one, {"url": other.url, "commit": "main"})
    with pytest.raises(BadInput) as caught:
        install_all([test], tmp_path / "install", print, packages=())
    sentence(caught)
    assert not (tmp_path / "install").exists()


def test_directory_that_cannot_be_used_is_bad_input(
    repo: Repo, make_test: MakeTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    (tmp_path / "file").touch()
    for name in ("file/x", "file"):
        with pytest.raises(BadInput, match=r"install_path") as caught:
            install_all([make_test(repo)], tmp_path / name, print, packages=())
        sentence(caught)
    assert not uninstall_all([make_test(repo)], tmp_path / "none", print, packages=())
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(BadInput) as caught:
        install_all([make_test(repo)], tmp_path, print, packages=())
    sentence(caught)


def test_file_system_without_locks_is_said(
    repo: Repo, make_test: MakeTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    said: list[str] = []
    monkeypatch.setattr("fcntl.flock", no_locks)
    assert not uninstall_all([make_test(repo)], tmp_path, said.append, packages=())
    assert "cannot be locked (Function not implemented); run one install at a time" in said[0]
