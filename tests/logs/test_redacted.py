"""What looks like a credential, and what does not."""

import time
from dataclasses import dataclass
from typing import Any

import pytest

from cloudai_mbridge.jobs import JobClass
from cloudai_mbridge.logs.redacted import redacted, redacted_in
from cloudai_mbridge.logs.tail import last_lines

TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("git clone https://bob:hunter2@git.example/x.git", "git clone https://***@git.example/x.git"),
        ("docker://t0k3n@nvcr.io#nvidia/x:1", "docker://***@nvcr.io#nvidia/x:1"),
        ("https://bob:p@ss@h.example", "https://***@h.example"),
        (f"401 for {TOKEN}, try again", "401 for ***, try again"),
        ("HF_TOKEN=abc python x", "HF_TOKEN=*** python x"),
        ("+ export WANDB_API_KEY='a b' X=1", "+ export WANDB_API_KEY=*** X=1"),
        ('{"AWS_SECRET_ACCESS_KEY": "abc/def"}', '{"AWS_SECRET_ACCESS_KEY": ***}'),
        ("DB_PASSWORD: hunter2", "DB_PASSWORD: ***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("authorization: Basic Ym9iOmh1bnRlcjI=", "authorization: Basic ***"),
        ("sent bearer eyJhbGciOiJIUzI1NiJ9.e30.x", "sent bearer ***"),
    ],
)
def test_a_credential_is_redacted_once_and_for_all(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("no user: https://a.example/x?y=1", "mail a@b.example", "NCCL_DEBUG=INFO", "MAX_TOKENS=512"),
        *("the bearer of bad news", "KeyError: 'x'", "model.num_key_heads=4", "hf_hub_download", "é 漢字 \x1b", ""),
        "MBRIDGE_STEP: tokens 5, key 6",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redacted(text) == text


@dataclass(frozen=True)
class _Told:
    text: str
    number: float | None = None


def test_values_of_every_kind() -> None:
    value: dict[str, Any] = {"a": [1, None, "x://u:p@h"], "b": (_Told("API_KEY=x", 0.5),), "HF_TOKEN": "x", "c": True}
    assert redacted_in({**value, "d": JobClass.FAILED}) == {
        **{"a": [1, None, "x://***@h"], "b": (_Told("API_KEY=***", 0.5),), "HF_TOKEN": "***", "c": True},
        **{"d": JobClass.FAILED},
    }


@pytest.mark.parametrize(
    "part", ["://", "://a", "A" * 70, "A_KEY", "A=", "bearer ", "hf_", "authorization: ", "'", '"A']
)
def test_a_strange_line_costs_no_time(part: str) -> None:
    started = time.process_time()
    redacted(part * (60_000 // len(part)))
    assert time.process_time() - started < 1


def test_evidence_has_none(tmp_path: Any) -> None:
    (tmp_path / "log").write_text(f"a\nHF_TOKEN=x\n{TOKEN}\n")
    assert last_lines(tmp_path / "log", 2) == ["HF_TOKEN=***", "***"]
    assert last_lines(tmp_path, 2) == []
