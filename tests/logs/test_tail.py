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


SIGNALLED = b"""\
W1129 13:00:00.1 77 torch/distributed/elastic/agent/server/api.py:725] Received 15 death signal, shutting down workers
W1129 13:00:00.2 77 torch/distributed/elastic/multiprocessing/api.py:910] Sending process 88 closing signal SIGTERM
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 931, in main
    run(args)
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 374, in launch_agent
    result = agent.run()
             ^^^^^^^^^^^
torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15
"""


@every(
    "noise",
    [
        SIGNALLED,
        SIGNALLED[SIGNALLED.index(b"    run(args)") :],  # its begin is not in the last 64 KiB
        b"W1129 13:00:00.1 77 torch/distributed/run.py:851] \nW1129 13:00:00.1 77 torch/distributed/run.py:851] "
        + b"*" * 41
        + b"\nW1129 13:00:00.1 77 torch/distributed/run.py:851] Setting OMP_NUM_THREADS environment variable for each"
        b" process to be 1 in default, to avoid your system being overloaded\n",
        b"absl.logging is not installed, logs go to stderr\n",
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
        b"Setting rerun_state_machine.current_iteration to 0...\n",
        b"[rank0]:[W1129 13:00:00.1 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called"
        b" before program exit\n",
    ],
)
def test_what_explains_no_failure_is_left_out(tmp_path: Path, noise: bytes) -> None:
    assert last_lines(_log(tmp_path, b"the cause\n" + noise), 9) == ["the cause"]
    assert last_lines(_log(tmp_path, noise + b"the cause\n"), 9) == ["the cause"]


def test_a_traceback_with_a_cause_stays(tmp_path: Path) -> None:
    cause = b'Traceback (most recent call last):\n  File "x.py", line 1, in f\nKeyError: 1\n'
    assert last_lines(_log(tmp_path, cause + SIGNALLED), 9) == cause.decode().splitlines()
