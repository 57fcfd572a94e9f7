"""What is told of a run's end never raises, never waits long, and shows no URL."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from cloudai_mbridge.completion import completion, hook
from cloudai_mbridge.errors import InUse, Paused, ToolFailure
from cloudai_mbridge.models.scenario import OnCompletion, RunnerConfig
from cloudai_mbridge.plan import ScenarioPlan
from tests.cases import every
from tests.golden import Sentence
from tests.http_server import Request, Server, serving
from tests.report.conftest import some_point, some_report

pytestmark = pytest.mark.process
SECRET = "T0123/B0123/never-to-be-seen"
FOR_EVER = 600
SAYS_A_PASSWORD = ["sh", "-c", "echo first; P=password; echo error: no --$P=hunter22 here >&2; exit 3"]


def plan(**asked: Any) -> ScenarioPlan:
    runner = RunnerConfig(on_completion=OnCompletion.model_validate(asked) if asked else None)
    return ScenarioPlan(scenario="s", system="l", tests=("t",), runs=(), rejected=(), runner=runner)


def ended(root: Path, error: Exception | None = None, **asked: Any) -> list[str]:
    """Tell of the end of a run that has a report, and return the notes."""
    notes: list[str] = []
    raising = pytest.raises(type(error)) if error else nullcontext()
    with raising as raised, completion(plan(**asked), root, notes.append) as take_report:
        take_report(some_report(some_point()))
        if error is not None:
            raise error
    assert raised is None or raised.value is error
    return notes


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "LONGEST_S", 0.5)


def test_nothing_is_asked_for(tmp_path: Path) -> None:
    assert ended(tmp_path) == []


def test_a_command_is_told(tmp_path: Path) -> None:
    words = ["sh", "-c", 'cat > "$1"; echo "$MBRIDGE_RUN" > "$2"', "sh", f"{tmp_path}/body", f"{tmp_path}/run"]
    assert ended(tmp_path, command=words) == []
    body = json.loads((tmp_path / "body").read_text())
    assert (body["state"], body["path"], body["counts"]["success"]) == ("success", str(tmp_path), 1)
    assert body["fastest"][0]["step_time_s"] == pytest.approx(3.425)  # the capped mean
    assert (tmp_path / "run").read_text() == f"{tmp_path}\n"


@every(
    ("error", "state"),
    [(ToolFailure("--password=hunter22 is wrong"), "failed"), (Paused("x"), "paused"), (KeyError("x"), "failed")],
)
def test_of_an_error(error: Exception, state: str, tmp_path: Path) -> None:
    assert ended(tmp_path, error, command=["sh", "-c", 'cat > "$1"', "sh", f"{tmp_path}/body"]) == []
    body = json.loads((tmp_path / "body").read_text())
    texts = {"ToolFailure": "--password=*** is wrong", "Paused": "x", "KeyError": "KeyError"}
    assert (body["state"], body["error"]) == (state, texts[type(error).__name__])


def test_a_run_that_another_process_holds_has_not_ended(tmp_path: Path) -> None:
    ended(tmp_path, InUse("x"), command=["touch", f"{tmp_path}/told"])
    assert not (tmp_path / "told").exists()


@every(
    ("words", "note"),
    [
        (
            ["sh", "-c", "echo first; P=password; echo error: no --$P=hunter22 here >&2; exit 3"],
            "sh failed with exit code 3: error: no --password=*** here",
        ),
        (["false"], "false failed with exit code 1: without output"),
        (["sh", "-c", "kill -9 $$"], "sh was killed by signal 9: without output"),
        (["/"], "/: cannot be started (Permission denied)"),
    ],
)
def test_a_command_that_fails(words: list[str], note: str, tmp_path: Path) -> None:
    (line,) = ended(tmp_path, command=words)
    assert line.startswith(f"note: on_completion: {note}")
    assert "hunter22" not in line
    assert "\n" not in line


def test_a_command_that_reads_nothing_and_prints_much(tmp_path: Path) -> None:
    assert ended(tmp_path, command=["sh", "-c", "yes | head -c 10000000"]) == []


@pytest.mark.usefixtures("soon")
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, sentence: Sentence) -> None:
    script = f'sleep {FOR_EVER} & echo $! > "$1"; wait'
    (note,) = ended(tmp_path, command=["sh", "-c", script, "sh", f"{tmp_path}/pid"])
    assert "note: on_completion:" in note
    sentence(note)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + FOR_EVER
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_wait_and_nothing_else(number: signal.Signals, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/started; exec sleep {FOR_EVER}"

    def interrupt() -> None:
        wait_until((tmp_path / "started").exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ended(tmp_path, command=["sh", "-c", script]) == ["note: on_completion: sh was stopped by a signal"]
    thread.join()


# Webhooks


def test_a_webhook_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("HOOK", f"{server.url}/{SECRET}\n")
        assert ended(tmp_path, webhook_env="HOOK") == []
        (tmp_path / "url").write_text(f"{server.url}/{SECRET}\n")
        assert ended(tmp_path, webhook_file=f"{tmp_path}/url") == []
    assert [request.path for request in server.requests] == [f"/{SECRET}"] * 2
    assert json.loads(server.requests[0].body)["text"].startswith("s on l: success: 1 success")


def answer(status: int, text: str = "") -> Callable[[Request], tuple[int, bytes]]:
    return lambda request: (status, text.encode())


@every(
    ("status", "text", "problem"),
    [
        (500, SECRET, "the server answered 500"),
        (404, "", "the server answered 404"),
        (302, f"/other/{SECRET}", "the server answered 302"),
        (307, f"/other/{SECRET}", "the server answered 307"),
    ],
)
def test_an_answer_that_is_no_success(
    status: int, text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(answer(status, text)) as server:
        monkeypatch.setenv("HOOK", f"{server.url}/{SECRET}")
        assert ended(tmp_path, webhook_env="HOOK") == [f"note: on_completion: webhook $HOOK: {problem}"]
    assert len(server.requests) == 1


@every(
    ("url", "problem"),
    [
        ("", "is not set"),
        (f"http://127.0.0.1:1/{SECRET}", "Connection refused"),
        (f"file:///{SECRET}", "is not a URL that begins with https:// or http://"),
        (f"http://127.0.0.1:1/{SECRET}/a b", "InvalidURL"),
        (f"http://127.0.0.1:{SECRET}", "InvalidURL"),
        (f"http://[{SECRET}", "ValueError"),
    ],
)
def test_a_url_that_cannot_be_used_is_not_shown(
    url: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", url)
    assert ended(tmp_path, webhook_env="HOOK") == [f"note: on_completion: webhook $HOOK: {problem}"]


def test_a_proxy_that_cannot_be_used_is_sent_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("http_proxy", server.url.replace("http:", "socks5h:"))
        monkeypatch.setenv("HOOK", f"http://hooks.example/{SECRET}")
        assert ended(tmp_path, webhook_env="HOOK") == [
            "note: on_completion: webhook $HOOK: its address, or that of a proxy, cannot be used"
        ]
    assert server.requests == []


def test_a_file_that_is_missing(tmp_path: Path, sentence: Sentence) -> None:
    (note,) = ended(tmp_path, webhook_file=f"{tmp_path}/url")
    assert "note: on_completion:" in note
    sentence(note)


@pytest.mark.usefixtures("soon")
def test_a_server_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def wait(request: Request) -> tuple[int, bytes]:
        release.wait(FOR_EVER)
        return 200, b""

    server: Server
    with serving(wait) as server:
        monkeypatch.setenv("HOOK", f"{server.url}/{SECRET}")
        notes = ended(tmp_path, webhook_env="HOOK")
        release.set()
    assert notes == ["note: on_completion: webhook $HOOK: has not ended in 0.5 s"]


def test_a_note_that_cannot_be_printed_does_not_matter(tmp_path: Path) -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError

    with completion(plan(command=["false"]), tmp_path, broken):
        pass


@every(
    "asked",
    [
        {},
        {"webhook_env": "A", "webhook_file": "b"},
        {"webhook_env": "https://hooks.example/x"},
        {"command": ["curl", "https://hooks.slack.com/services/T01/B01/abcdefgh"]},
        {"command": ["notify", "--token", "abcdef0123456789"]},
    ],
)
def test_what_is_refused(sentence: Sentence, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        OnCompletion.model_validate(asked)
    sentence(caught)
