"""The last lines of a log, as they are shown to a user."""

from pathlib import Path

from cloudai_mbridge.logs.tail import last_lines
from tests.cases import every


def _log(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "stderr.txt"
    path.write_bytes(content)
    return path


def test_records_are_no_evidence(tmp_path: Path) -> None:
    path = _log(
        tmp_path, b'one\nMBRIDGE_STEP {"step": 1}\n0: MBRIDGE_STEP {"a": 1}\nwarning: x MBRIDGE_RUN {"b": 2}\ntwo\n'
    )
    assert last_lines(path, 3) == ["one", "warning: x", "two"]


@every(
    ("content", "count", "lines"),
    [
        (b"one\n\ntwo\r\n   \nthree\nfour\n\n\n", 3, ["two", "three", "four"]),
        (b"one\n\ntwo\r\n   \nthree\nfour\n\n\n", 99, ["one", "two", "three", "four"]),
        (b"", 5, []),
        (b"\n \n\t\n", 5, []),
        (b"a\nb", 1, ["b"]),
        (b"\x1b[31mred\x1b[0m \x07\x00\tend\n", 1, ["\\x1b[31mred\\x1b[0m \\x07\\x00\tend"]),
        (b"caf\xe9 \xf0\x9f\x98\x80\n", 1, ["caf\ufffd 😀"]),
    ],
)
def test_the_last_lines_that_are_not_blank(tmp_path: Path, content: bytes, count: int, lines: list[str]) -> None:
    assert last_lines(_log(tmp_path, content), count) == lines
    assert last_lines(tmp_path / "gone", count) == []


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    path = _log(tmp_path, b"".join(b"line %d %s\n" % (i, b"x" * 990) for i in range(3000)))
    lines = last_lines(path, 100)
    assert lines[-1].startswith("line 2999 ")
    assert 60 <= len(lines) <= 66


def test_one_endless_line(tmp_path: Path) -> None:
    (line,) = last_lines(_log(tmp_path, b"x" * 1_000_000), 5)
    assert set(line) == {"x"}
    assert len(line) <= 1 << 16


def test_what_torchrun_says_of_itself_is_left_out(tmp_path: Path) -> None:
    path = _log(
        tmp_path,
        b"Traceback (most recent call last):\n"
        b'  File "x.py", line 1\n'
        b"ValueError: the reason\n"
        b"E0102 03:04:05 12 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 0"
        b" (pid: 7) of binary: /usr/bin/python\n" + b"torchrun's own traceback\n" * 40,
    )
    lines = last_lines(path, 3)
    assert lines[0] == '  File "x.py", line 1'
    assert lines[1] == "ValueError: the reason"
    assert "failed (exitcode: 1) local_rank: 0" in lines[2]
