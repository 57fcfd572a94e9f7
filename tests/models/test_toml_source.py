"""Where a key stands in its file, and what is said of a file that is not TOML."""

from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.toml_source import TomlSource, dotted, read_toml
from tests.cases import every

SCENARIO = """\
name = "s"        # line 1

[[Tests]]
id = "a"
"test_name" = "x"

  [Tests.cmd_args]
  tp = [
    1,
    2,
  ]
  pp = 4

  [[Tests.dependencies]]
  id = "b"
  [[Tests.dependencies]]
  id = "c"

[[Tests]]
id = "b"
cmd_args.tp = 8

[[Tests.dependencies]]
id = "d"
"""


def _read(tmp_path: Path, text: str) -> TomlSource:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return read_toml(path)


@every(
    ("key_path", "line"),
    [
        (("name",), 1),
        (("Tests", 0), 3),
        (("Tests", 0, "id"), 4),
        (("Tests", 0, "test_name"), 5),
        (("Tests", 0, "cmd_args"), 7),
        (("Tests", 0, "cmd_args", "tp"), 8),
        (("Tests", 0, "cmd_args", "pp"), 12),
        (("Tests", 0, "dependencies", 0, "id"), 15),
        (("Tests", 0, "dependencies", 1), 16),
        (("Tests", 0, "dependencies", 1, "id"), 17),
        (("Tests", 1, "id"), 20),
        (("Tests", 1, "cmd_args", "tp"), 21),
        (("Tests", 1, "dependencies", 0, "id"), 24),
    ],
)
def test_every_key_has_its_own_line(tmp_path: Path, key_path: tuple[str | int, ...], line: int) -> None:
    source = _read(tmp_path, SCENARIO)
    assert source.where(key_path) == f"{source.path}:{line}: {dotted(key_path)}"


@every(
    ("key_path", "line"),
    [
        (("Tests", 0, "cmd_args", "tp", 1), 8),  # an element of a list
        (("Tests", 1, "dependencies", 0, "type"), 23),  # a key that is missing
        (("Tests", 1, "extra_env_vars"), 19),
    ],
)
def test_what_has_no_line_gets_the_nearest_parents(tmp_path: Path, key_path: tuple[str | int, ...], line: int) -> None:
    source = _read(tmp_path, SCENARIO)
    assert source.where(key_path).startswith(f"{source.path}:{line}: ")


def test_without_any_known_line_only_the_file_is_named(tmp_path: Path) -> None:
    source = _read(tmp_path, SCENARIO)
    assert source.where(("nothing",)) == f"{source.path}: nothing"
    assert source.where(()) == str(source.path)


def test_a_quoted_key_with_a_dot_is_one_key(tmp_path: Path) -> None:
    source = _read(tmp_path, '[extra_cmd_args]\na = "1"\n"optimizer.lr" = "2"\n')
    assert source.where(("extra_cmd_args", "optimizer.lr")).startswith(f"{source.path}:3: ")


def test_a_commented_header_is_no_header(tmp_path: Path) -> None:
    source = _read(tmp_path, "[a]\n# [b]\nx = 1\n")
    assert source.where(("a", "x")).startswith(f"{source.path}:3: ")


def test_carriage_returns_do_not_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "dos.toml"
    path.write_bytes(b"a = 1\r\n\r\n[t]\r\nb = 2\r\n")
    source = read_toml(path)
    assert source.data == {"a": 1, "t": {"b": 2}}
    assert source.where(("t", "b")).startswith(f"{path}:4: ")


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
def test_only_line_feeds_end_a_line(tmp_path: Path, separator: str) -> None:
    """TOML's lines, which tomllib counts in its messages, end at a line feed and nowhere else."""
    source = _read(tmp_path, f"# one{separator}still one\na = 1\n")
    assert source.where(("a",)).startswith(f"{source.path}:2: ")


def test_dotted_shows_indices_in_brackets() -> None:
    assert dotted(("a", "b", 0, "c")) == "a.b[0].c"
    assert dotted(()) == ""


def test_a_parse_error_has_the_parsers_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        _read(tmp_path, 'name = "a"\ntp = = 2\n')
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'x.toml'}: not valid TOML: ")
    assert "line 2, column 6" in message
    assert "\n" not in message


def test_a_duplicate_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not valid TOML: .*line 2.*; a key stands twice: leave one"):
        _read(tmp_path, "a = 1\na = 2\n")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone\.toml: no such file"):
        read_toml(tmp_path / "gone.toml")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a directory, not a regular file"):
        read_toml(tmp_path)


def test_bytes_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin1.toml"
    path.write_bytes('a = "é"\n'.encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin1\.toml: cannot be read as UTF-8"):
        read_toml(path)


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "a = " + "9" * 5000], ids=["nested", "digits"])
def test_what_the_parser_cannot_hold_is_bad_input(tmp_path: Path, text: str) -> None:
    """tomllib recurses, and int() has a limit of digits: neither may end in a traceback."""
    with pytest.raises(BadInput):
        _read(tmp_path, text)
