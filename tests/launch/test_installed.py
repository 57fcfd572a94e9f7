"""Names below install_path: readable, one path component each, whatever the URL, commit or image."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cloudai_mbridge.megatron_bridge.release import image_path, repo_path, venv_path
from tests.cases import every

BASE = Path("/install")


@every(
    ("url", "commit", "name"),
    [
        ("https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "v0.3.0", "Megatron-Bridge__v0.3.0"),
        ("https://github.com/NVIDIA-NeMo/Run.git", "main", "Run__main"),
        ("git@github.com:Run.git", "main", "Run__main"),
        ("/srv/git/Run/", "0a1b", "Run__0a1b"),
    ],
)
def test_readable_names(url: str, commit: str, name: str) -> None:
    assert repo_path(BASE, url, commit) == BASE / name
    assert venv_path(BASE, url, commit) == BASE / f"{name}-venv"


def test_a_branch_with_a_slash_is_one_component_and_no_other_branch() -> None:
    paths = {repo_path(BASE, "Run", commit) for commit in ("a/b", "a_b", "a b", "../a_b")}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {BASE}


def test_an_image() -> None:
    path = image_path(BASE, "nvcr.io#nvidia/nemo:26.02.00")
    assert path.parent == BASE
    assert path.name.startswith("nvcr.io_nvidia_nemo_26.02.00-")
    assert path.suffix == ".sqsh"


@given(st.text(), st.text())
def test_any_text_is_one_safe_component(url: str, commit: str) -> None:
    for path in (repo_path(BASE, url, commit), venv_path(BASE, url, commit), image_path(BASE, url)):
        assert path.parent == BASE
        assert path.name.isascii()
        assert len(path.name) < 255
