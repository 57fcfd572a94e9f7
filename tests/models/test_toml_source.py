"""Where a key stands in its file, and what is said of a file that is not TOML."""

from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.toml_source import TomlSource, dotted, read_toml
from tests.cases import every
from tests.golden import Sentence

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


@every(
    ("text", "key_path", "line"),
    [
        ('[extra_cmd_args]\na = "1"\n"optimizer.lr" = "2"\n', ("extra_cmd_args", "optimizer.lr"), 3),
        ("[a]\n# [b]\nx = 1\n", ("a", "x"), 3),
        ("a = 1\r\n\r\n[t]\r\nb = 2\r\n", ("t", "b"), 4),
        # TOML's lines, which tomllib counts in its messages, end at a line feed and nowhere else
        *((f"# one{separator}still one\na = 1\n", ("a",), 2) for separator in ("\u2028", "\x85")),
    ],
)
def test_lines_of_other_files(tmp_path: Path, text: str, key_path: tuple[str, ...], line: int) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode())
    assert read_toml(path).where(key_path).startswith(f"{path}:{line}: ")


def test_without_any_known_line_only_the_file_is_named(tmp_path: Path) -> None:
    source = _read(tmp_path, SCENARIO)
    assert source.where(("nothing",)) == f"{source.path}: nothing"
    assert source.where(()) == str(source.path)


def test_a_parse_error_has_the_parsers_line_and_column(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        _read(tmp_path, 'name = "a"\ntp = = 2\n')
    message = str(caught.value)
    sentence(message)
    assert "line 2, column 6" in message
    assert "\n" not in message


def test_a_duplicate_key_is_an_error(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match="line 2") as caught:
        _read(tmp_path, "a = 1\na = 2\n")
    sentence(caught)


def test_what_is_no_text_file_is_named(tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "latin1.toml").write_bytes('a = "é"\n'.encode("latin-1"))
    for name in ("gone", "", "latin1"):
        path = tmp_path / f"{name}.toml" if name else tmp_path
        with pytest.raises(BadInput, match=f"^{path}: ") as caught:
            read_toml(path)
        sentence(caught)


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "a = " + "9" * 5000], ids=["nested", "digits"])
def test_what_the_parser_cannot_hold_is_bad_input(tmp_path: Path, text: str) -> None:
    """tomllib recurses, and int() has a limit of digits: neither may end in a traceback."""
    with pytest.raises(BadInput):
        _read(tmp_path, text)
