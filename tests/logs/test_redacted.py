"""What looks like a credential, and what does not."""

import time
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.logs.tail import last_lines
from cloudai_mbridge.models.credentials import find_credential
from cloudai_mbridge.schedulers.interface import JobClass
from cloudai_mbridge.training.credentials.scrub import redacted, redacted_in
from tests.cases import every
from tests.models.test_credentials import SHAPES

TOKEN = "hf_" + "aB3" * 10


@every(
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


@every("form", ["{}", "rank 0: {}", "+ {} --next", "['{}', 1]"])
@every("text", SHAPES)
def test_every_shape_that_is_refused_elsewhere_is_redacted(text: str, form: str) -> None:
    shown = redacted(form.replace("{}", text))
    assert find_credential(shown) is None
    assert redacted(shown) == shown
    assert "hunter2" not in shown


@every(
    ("text", "shown"),
    [
        ("GET https://h/x?access_token=hunter2&a=b", "GET https://h/x?access_token=***"),
        ("+ train --hf_token hunter2 -wdk hunter2", "+ train --hf_token *** -wdk ***"),
        ("cannot reach bob:hunter2@proxy:3128", "cannot reach ***@proxy:3128"),
        ("password='" + 300 * "x" + "' a=b", "password=*** a=b"),
        ("DB_PASSWORD=hun,ter2;x a", "DB_PASSWORD=*** a"),
        ("wandb_api_key: hunter2", "wandb_api_key: ***"),
        ("rank 0: db_password: abcdef", "rank 0: db_password: ***"),
        ("Command '['python', '--hf_token', 'hunter2', '-x']'", "Command '['python', '--hf_token', '***', '-x']'"),
        ('["-wdk","hunter2"]', '["-wdk","***"]'),
        ("mount //bob:hunter2@h/share", "mount //***@h/share"),
    ],
)
def test_what_belongs_to_a_credential_goes_with_it(text: str, shown: str) -> None:
    assert redacted(text) == shown


@every(
    "text",
    [
        *("--comment=run:7@teamA", "--licenses=matlab:4,ansys@flexlm:2", "--hf_token_path /a", "HF_TOKEN=${HF_TOKEN}"),
        *("docker run --user app:app x", "EOS_TOKEN=</s>", "/data/hf_llama3nemotron405binstruct", "api_key: missing"),
        *("srun -u --gres=gpu:8", "sbatch --signal=B:USR1@60", "--hf_token: missing", "see nvcr.io/a:1@sha256:0f"),
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
    value: dict[str, Any] = {"a": [1, None, "x://u:p@h"], "b": (_Told("API_KEY=x", 0.5),), "HF_TOKEN": "x y", "c": True}
    value |= {f"packages of {TOKEN}": "1", "api_key": "x", 5: "y"}
    assert redacted_in({**value, "d": JobClass.FAILED}) == {
        **{"a": [1, None, "x://***@h"], "b": (_Told("API_KEY=***", 0.5),), "HF_TOKEN": "***", "c": True},
        **{"packages of ***": "1", "api_key": "***", 5: "y"},
        **{"d": JobClass.FAILED},
    }


@every(
    "part",
    [
        *("://", "://a", "://a:b", "?sig=", "a:b@", "x-api-key:", '"api_key":"', "--password ", "-u a:b", "A" * 70),
        *("A_KEY", "A=", "bearer ", "hf_", "authorization: ", "'", '"A'),
    ],
)
def test_a_strange_line_costs_no_time(part: str) -> None:
    started = time.process_time()
    redacted(part * (60_000 // len(part)))
    assert time.process_time() - started < 1


def test_evidence_has_none(tmp_path: Any) -> None:
    (tmp_path / "log").write_text(f"a\nHF_TOKEN=x\n{TOKEN}\n")
    assert last_lines(tmp_path / "log", 2) == ["HF_TOKEN=***", "***"]
    assert last_lines(tmp_path, 2) == []


def test_evidence_has_no_private_key(tmp_path: Any) -> None:
    key = "-----BEGIN PRIVATE KEY-----\nbm90aGluZw==\n-----END PRIVATE KEY-----"
    (tmp_path / "log").write_text(f"a\n{key}\nb\n")
    assert last_lines(tmp_path / "log", 9) == ["a", "***", "b"]
