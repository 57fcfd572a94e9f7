"""What may hold a credential, and where one is refused."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.credentials import find_credential, find_credential_in_words, is_secret
from cloudai_mbridge.models.test_definition import GitRepo, MegatronBridgeTestDefinition


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HFTOKEN", "HF_TOKEN2", "MYTOKENX", "WANDB_API_KEY", "WANDBKEY", "AWS_ACCESS_KEY_ID", "API-KEY"),
        *("SSH_PRIVATE_KEY_2", "KEYFILE", "DB_PASS", "DB_PASSWORD", "PASSPHRASE", "GH_PAT", "MY_SECRET", "PWD"),
    ],
)
def test_names_of_credentials(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "tokenizer_type", "use_tokendrop", "PATH", "PYTHONPATH", "NCCL_DEBUG", "tp"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "tokens_per_step", "num_gpus", "pass_through", "MASTER_PORT"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def definition(**keys: Any) -> MegatronBridgeTestDefinition:
    return MegatronBridgeTestDefinition.model_validate({"name": "t", "description": "d", **keys})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "x") for key in ("logger.wandb_api_key", "a.hf_token", "x.secret", "checkpoint.password", "a.token")),
        *((key, "x") for key in ("-hf", "--hf", "--hf_t", "--hf_token", "-wdk", "--wandb_k", "--wandb_key")),
        *((key, "") for key in ("--hf=x", "logger.wandb_key=x")),
        ("-cb", "export HF_TOKEN=x"),
        ("--custom_env_vars", "A=1,WANDB_API_KEY=x"),
        ("-cb=export MY_PASSWORD=x", ""),
        ("model.x", "hf_" + 34 * "a"),
    ],
)
def test_an_override_with_a_credential_is_refused(key: str, value: str) -> None:
    with pytest.raises(ValidationError, match="would put a credential into a script"):
        definition(extra_cmd_args={key: value})


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer.tokenizer_model", "dataset.num_tokens", "model.num_layers", "--optimizer_type", "-cb"),
        *("dataset.label_key", "tokenizer.pad_token", "dataset.dataset_kwargs.answer_token", "~x", "+a[2].b"),
    ],
)
def test_other_overrides_are_taken(key: str) -> None:
    assert definition(extra_cmd_args={key: "x"}).extra_cmd_args == {key: "x"}


def test_an_override_may_hold_its_value_in_its_key() -> None:
    assert definition(extra_cmd_args={"model.x=1": ""}).extra_cmd_args == {"model.x": "1"}
    assert definition(extra_cmd_args={"model.x=1": "2"}).extra_cmd_args == {"model.x": "1=2"}
    assert definition(extra_cmd_args={"model.x=": ""}).extra_cmd_args == {"model.x=": ""}
    with pytest.raises(ValidationError, match="is not a key"):
        definition(extra_cmd_args={"=1": ""})


def test_a_repository_address_with_a_password_is_refused() -> None:
    with pytest.raises(ValidationError, match="may hold a credential; remove what stands before the @"):
        GitRepo(url="https://bob:hunter2@example.com/a.git", commit="x")
    with pytest.raises(ValidationError, match="may hold a credential; remove what stands before the @"):
        GitRepo(url="https://nvidia@dev.azure.com/a.git", commit="x")
    assert GitRepo(url="git@example.com:a/b.git", commit="x")
    assert GitRepo(url="ssh://git@example.com:22/a/b.git", commit="x")


SHAPES = [
    *("http://bob:hunter2@proxy:3128", "https://t0ken@git.example/x", "bob:hunter2@proxy:3128", "s3://a:p/w@b"),
    *("docker://bob:hunter2@nvcr.io#a/b:1", "git+ssh://bob:pw@h/x.git", "redis://:hunter2@cache:6379/0"),
    *("Authorization: Bearer abc", "authorization: Basic Ym9iOmh1", "PRIVATE-TOKEN: abcdef", "x-api-key: abc"),
    *("ALL,HF_TOKEN=x", "--export=NONE,WANDB_API_KEY=x,B=1", "A=1 MY_PASSWORD='a b'", "DB_PASSWORD: hunter2"),
    *(
        "--hf-token=abc",
        "password=hunter2",
        '{"api_key": "abc"}',
        "https://h/x?access_token=abc",
        "AccountKey=abc=",
    ),
    *("hf_" + 24 * "a", "ghp_" + 36 * "a", "nvapi-" + 40 * "a", "glpat-" + 20 * "a", "AKIA" + 16 * "A"),
    *("-----BEGIN OPENSSH PRIVATE KEY-----\nx", "machine h login bob password hunter2", "curl -u bob:hunter2 h"),
    *("Basic Ym9iOmh1bnRlcjI=", "https://hooks.slack.com/services/T0/B0/x", "https://h/c?sv=1&sig=" + 20 * "a"),
    *('{"x-vault-token": "hunter2"}', r"{\"api_key\": \"hunter2\"}", "login(password='hunter2')"),
    *("WANDB_API_KEY " + 40 * "0f", "-x HF_TOKEN=abc", "user=bob password = hunter2", "MYSQL_PWD=hunter2"),
]


@pytest.mark.parametrize("text", SHAPES)
def test_shapes_of_credentials(text: str) -> None:
    found = find_credential(text)
    assert found is not None
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    "text",
    [
        *("http://proxy:3128", "https://github.com/a/b.git", "git@github.com:a/b.git", "ssh://git@h:22/a", "/a:/b:ro"),
        *(
            "docker://a/b@sha256:0f",
            "docker://a/b:24.01@sha256:0f",
            "localhost:5000/a/b:1@sha256:0f",
            "user@example.com",
        ),
        *("https://h:8080/a/b@c", "http://bob:$PW@proxy:3128", "https://${USER}:${PW}@h", "nvcr.io#nvidia/nemo:26.02"),
        *(
            "ALL,HF_TOKEN",
            "--export=ALL,HF_TOKEN=$HF_TOKEN",
            "HF_TOKEN=",
            "Authorization: Bearer $TOKEN",
            "MAX_TOKENS=5",
        ),
        *("HF_HUB_DISABLE_IMPLICIT_TOKEN=1", "tokenizer_model=x", "label_key=y", '{"pad_token": "<pad>"}', "tp=2,pp=4"),
        *("--constraint=a&b", "Et*3|(tt|)*29,mL", "the bearer of news", "a note: one token: two", "sort_key=step", ""),
        *(
            "-u PYTHONPATH",
            "--user 1000:1000",
            "a basic model",
            "https://h/?design=" + 20 * "a",
            "the key of a map is x",
        ),
        *("-u --gpus-per-node=h100:4", "--mpi=pmix -u --gres=gpu:8", "-u --distribution=block:cyclic", "-u"),
        *("--signal=B:USR1@60", "USR1@60", "B:USR1@60", "--signal=B:TERM@120 --gres=gpu:8", "--userns=keep-id:uid=1"),
        *("sk-learn", "hf_hub_download", 40 * "0f", "TOKENIZERS_PARALLELISM=false", "model.num_key_heads=4"),
    ],
)
def test_shapes_of_other_things(text: str) -> None:
    assert find_credential(text) is None


def test_an_option_may_stand_before_its_value() -> None:
    assert find_credential_in_words("--mpi pmix --password hunter2")
    assert find_credential_in_words("--export 'ALL,HF_TOKEN=a b'")
    assert not find_credential_in_words("--mpi pmix --container-mount-home --export ALL,HF_TOKEN")


@pytest.mark.parametrize(
    "part", ["://", "://a:b", "?sig=", "a:b", "A_KEY", "A_KEY=", "--a-", "bearer ", "authorization: ", "eyJ", "x-", "'"]
)
def test_a_long_text_costs_no_time(part: str) -> None:
    started = time.process_time()
    find_credential(part * (60_000 // len(part)))
    assert time.process_time() - started < 2
