"""Files are written whole, or not at all."""

from pathlib import Path

import pytest

from cloudai_mbridge.files.replace import replacing, write_text


@pytest.mark.parametrize("place", ["missing/x", "file/x", "directory", "n" * 250])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match=r"Errno") as raised:
        write_text(tmp_path / place, "text")
    assert raised.value.filename == str(tmp_path / place)
    assert raised.value.filename2 is None
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_the_old_file_stays_where_writing_fails(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "file"):
        pass  # nothing was written
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
