"""What may hold a credential, and where one is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.base import is_secret
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
