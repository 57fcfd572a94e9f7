"""Images: a fake enroot at the process boundary, called so."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.installables import ImageInstall
from tests.golden import Sentence

pytestmark = pytest.mark.process

NEMO = ImageInstall("nvcr.io/nvidia/nemo:26.06.00")
Calls = Callable[[], list[list[str]]]


def test_image_is_imported_once(tmp_path: Path, enroot_calls: Calls) -> None:
    path = tmp_path / "images" / "nemo.sqsh"
    NEMO.install(path)
    before = path.stat()
    NEMO.install(path)
    ((command, option, payload, uri),) = enroot_calls()
    assert (command, option, uri) == ("import", "-o", "docker://nvcr.io#nvidia/nemo:26.06.00")
    assert Path(payload).parent.parent == path.parent
    assert path.read_bytes() == b"hsqs"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert NEMO.uninstall(path)
    assert list(path.parent.iterdir()) == []


def test_two_spellings_are_one_image(tmp_path: Path, enroot_calls: Calls) -> None:
    path = tmp_path / "nemo.sqsh"
    NEMO.install(path)
    assert ImageInstall("nvcr.io#nvidia/nemo:26.06.00").is_installed(path)
    assert not ImageInstall("nvcr.io#nvidia/nemo:26.02.00").is_installed(path)


def test_file_that_is_not_ours_is_moved_aside_and_survives_uninstall(tmp_path: Path, enroot_calls: Calls) -> None:
    path, said = tmp_path / "nemo.sqsh", list[str]()
    path.write_text("half an image, or somebody's")
    assert not NEMO.is_installed(path)
    assert not NEMO.uninstall(path)
    NEMO.install(path, said.append)
    assert said == [f"{path} was not installed by mbridge; moved to nemo.sqsh.set-aside-1"]
    assert (tmp_path / "nemo.sqsh.set-aside-1").read_text() == "half an image, or somebody's"
    assert NEMO.is_installed(path)


def test_marker_vouches_for_no_other_file_and_none_without_one_is_repaired(tmp_path: Path, enroot_calls: Calls) -> None:
    path = tmp_path / "nemo.sqsh"
    NEMO.install(path)
    path.write_text("somebody put another one here")
    assert not NEMO.is_installed(path)
    assert not NEMO.uninstall(path)
    path.unlink()  # as after a kill between marker and image
    assert not NEMO.is_installed(path)
    NEMO.install(path)
    assert NEMO.is_installed(path)


def test_failure_has_enroots_words(tmp_path: Path, enroot_calls: Calls, sentence: Sentence) -> None:
    (tmp_path / "enroot.log.fail").touch()
    with pytest.raises(ToolFailure) as caught:
        NEMO.install(tmp_path / "nemo.sqsh")
    sentence(caught)
    assert not list(tmp_path.glob("*nemo*"))


def test_without_an_image_or_enroot_it_fails(
    tmp_path: Path, fake_command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    fake_command("enroot", "#!/bin/sh\nexit 0\n")
    with pytest.raises(ToolFailure) as caught:
        NEMO.install(tmp_path / "nemo.sqsh")
    sentence(caught)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ToolFailure) as caught:
        NEMO.install(tmp_path / "nemo.sqsh")
    sentence(caught)


def test_credentials_of_the_environment_are_masked(
    tmp_path: Path, fake_command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setenv("NGC_API_KEY", "nvapi-hunter2")
    fake_command("enroot", '#!/bin/sh\necho "error: $NGC_API_KEY at https://u:p@host/ is wrong" >&2\nexit 1\n')
    with pytest.raises(ToolFailure) as caught:
        NEMO.install(tmp_path / "nemo.sqsh")
    sentence(caught)
