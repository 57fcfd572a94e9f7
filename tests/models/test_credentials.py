"""What may hold a credential, and where one is refused."""

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.credentials import find_credential, find_credential_in_words, is_secret_variable
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.test_definition import GitRepo, TestDefinition
from cloudai_mbridge.training.credentials.find import is_secret
from tests.cases import every
from tests.golden import Sentence


@every(
    ("name", "is_of_credential"),
    [
        *((name, True) for name in ("HF_TOKEN", "HFTOKEN", "HF_TOKEN2", "MYTOKENX", "WANDB_API_KEY", "WANDBKEY")),
        *((name, True) for name in ("AWS_ACCESS_KEY_ID", "API-KEY", "SSH_PRIVATE_KEY_2", "KEYFILE", "DB_PASS", "PWD")),
        *((name, True) for name in ("DB_PASSWORD", "PASSPHRASE", "GH_PAT", "MY_SECRET", "REGISTRY_AUTH", "NPM_AUTH")),
        *((name, True) for name in ("HTTP_AUTHORIZATION", "DOCKER_AUTH_CONFIG")),
        *(
            (name, False)
            for name in ("TOKENIZERS_PARALLELISM", "tokenizer_type", "use_tokendrop", "PATH", "PYTHONPATH")
        ),
        *((name, False) for name in ("NCCL_DEBUG", "tp", "CUDA_DEVICE_MAX_CONNECTIONS", "tokens_per_step", "num_gpus")),
        *((name, False) for name in ("pass_through", "MASTER_PORT", "SSH_AUTH_SOCK", "AUTH_TYPE", "GIT_AUTHOR_NAME")),
        ("AUTHORITY", False),
    ],
)
def test_names_of_credentials(name: str, is_of_credential: bool) -> None:
    assert is_secret(name) is is_of_credential


def definition(**keys: Any) -> TestDefinition:
    return TestDefinition.model_validate({"name": "t", "description": "d", **keys})


@every(
    ("key", "value"),
    [
        *((key, "x") for key in ("logger.wandb_api_key", "a.hf_token", "x.secret", "checkpoint.password", "a.token")),
        *((key, "x") for key in ("-hf", "--hf", "--hf_t", "--hf_token", "-wdk", "--wandb_k", "--wandb_key")),
        *((key, "") for key in ("--hf=x", "logger.wandb_key=x")),
        ("-cb", "export HF_TOKEN=x"),
        ("--custom_env_vars", "A=1,WANDB_API_KEY=x"),
        ("-cb=export MY_PASSWORD=x", ""),
        ("model.x", "hf_" + 34 * "a"),
        ("-cb", "login --token hunter2"),
    ],
)
def test_an_override_with_a_credential_is_refused(sentence: Sentence, key: str, value: str) -> None:
    with pytest.raises(ValidationError) as caught:
        definition(extra_cmd_args={key: value})
    sentence(caught)


@every(
    "key",
    [
        *("tokenizer.tokenizer_model", "dataset.num_tokens", "model.num_layers", "--optimizer_type", "-cb"),
        *("dataset.label_key", "tokenizer.pad_token", "dataset.dataset_kwargs.answer_token", "~x", "+a[2].b"),
    ],
)
def test_other_overrides_are_taken(key: str) -> None:
    assert definition(extra_cmd_args={key: "x"}).extra_cmd_args == {key: "x"}


def test_an_override_may_hold_its_value_in_its_key(sentence: Sentence) -> None:
    assert definition(extra_cmd_args={"model.x=1": ""}).extra_cmd_args == {"model.x": "1"}
    assert definition(extra_cmd_args={"model.x=1": "2"}).extra_cmd_args == {"model.x": "1=2"}
    assert definition(extra_cmd_args={"model.x=": ""}).extra_cmd_args == {"model.x=": ""}
    with pytest.raises(ValidationError) as caught:
        definition(extra_cmd_args={"=1": ""})
    sentence(caught)


def test_a_repository_address_with_a_password_is_refused(sentence: Sentence) -> None:
    with pytest.raises(ValidationError) as caught:
        GitRepo(url="https://bob:hunter2@example.com/a.git", commit="x")
    sentence(caught)
    with pytest.raises(ValidationError) as caught:
        GitRepo(url="https://nvidia@dev.azure.com/a.git", commit="x")
    sentence(caught)
    assert GitRepo(url="git@example.com:a/b.git", commit="x")
    assert GitRepo(url="ssh://git@example.com:22/a/b.git", commit="x")


SHAPES = [
    *("http://bob:hunter2@proxy:3128", "https://t0ken@git.example/x", "bob:hunter2@proxy:3128", "s3://a:p/w@b"),
    *("docker://bob:hunter2@nvcr.io#a/b:1", "git+ssh://bob:pw@h/x.git", "redis://:hunter2@cache:6379/0"),
    *("Authorization: Bearer abc", "authorization: Basic Ym9iOmh1", "PRIVATE-TOKEN: abcdef", "x-api-key: abc"),
    *("ALL,HF_TOKEN=x", "--export=NONE,WANDB_API_KEY=x,B=1", "A=1 MY_PASSWORD='a b'", "DB_PASSWORD: hunter2"),
    *("--hf-token=abc", "password=hunter2", '{"api_key": "abc"}', "https://h/x?access_token=abc", "AccountKey=abc="),
    *("hf_" + 34 * "a", "ghp_" + 36 * "a", "nvapi-" + 40 * "a", "glpat-" + 20 * "a", "AKIA" + 16 * "A"),
    *("-----BEGIN OPENSSH PRIVATE KEY-----\nx", "machine h login bob password hunter2", "curl -u bob:hunter2 h"),
    *("Basic Ym9iOmh1bnRlcjI=", "https://hooks.slack.com/services/T0/B0/x", "https://h/c?sv=1&sig=" + 20 * "a"),
    *('{"x-vault-token": "hunter2"}', r"{\"api_key\": \"hunter2\"}", "login(password='hunter2')"),
    *("WANDB_API_KEY " + 40 * "0f", "-x HF_TOKEN=abc", "user=bob password = hunter2", "MYSQL_PWD=hunter2"),
    *("//bob:hunter2@h/share", "--proxy=bob:hunter2@proxy", "http_proxy=bob:hunter2@proxy"),
    *("curl -sku bob:hunter2 h", "HF_TOKEN=${HF_TOKEN:-hunter2}", "HF_TOKEN=$HF_TOKEN,B=1 WANDB_KEY=hunter2"),
    *("bob:hunter2@10.0.0.1", "-xbob:hunter2@proxy:3128", "Basic Ym9iOmh1bnRlcjJ4", "mysql -u bob -phunter2 db"),
    *("run --password hunter2 x", "x --token=a --api-key hunter2", '{"auths": {"r": {"auth": "Ym9iOmh1bnRlcjI="}}}'),
    *(r"{\"auth\": \"Ym9iOmh1bnRlcjJ4\"}", "sshpass -p hunter2 ssh h", "docker login -u bob -p hunter2"),
    *("wandb login " + 20 * "0f", "password: 'hunter2'", "{db_password: hunter, user: x}", "wandb_api_key: hunter2"),
    *("AWS_SECRET_ACCESS_KEY=/hun+ter2/abc", "DB_PASSWORD=12345", "sk-" + 24 * "aB3", "sk-proj-" + 40 * "a"),
    *("sk-ant-api03-" + 10 * "aB3-" + 20 * "Zz9", "sk-" + 16 * "0f", "pypi-AgEIcHlwaS5vcmc" + 40 * "a"),
    *("npm_" + 36 * "a", "dop_v1_" + 64 * "a", "ya29." + 40 * "a", "dckr_pat_" + 24 * "a", "hvs." + 24 * "a"),
    *("dapi" + 32 * "a", "gsk_" + 48 * "a", "sk_live_" + 24 * "a"),
]


@every("text", SHAPES)
def test_shapes_of_credentials(text: str) -> None:
    found = find_credential(text)
    assert found is not None
    assert "hunter2" not in str(found)


@every(
    "text",
    [
        *("http://proxy:3128", "https://github.com/a/b.git", "git@github.com:a/b.git", "ssh://git@h:22/a"),
        *("/a:/b:ro", "docker://a/b@sha256:0f", "docker://a/b:24.01@sha256:0f", "localhost:5000/a/b:1@sha256:0f"),
        *("user@example.com", "https://h:8080/a/b@c", "http://bob:$PW@proxy:3128", "https://${USER}:${PW}@h"),
        *("nvcr.io#nvidia/nemo:26.02", "ALL,HF_TOKEN", "--export=ALL,HF_TOKEN=$HF_TOKEN", "HF_TOKEN="),
        *("Authorization: Bearer $TOKEN", "MAX_TOKENS=5", "HF_HUB_DISABLE_IMPLICIT_TOKEN=1", "tokenizer_model=x"),
        *("label_key=y", '{"pad_token": "<pad>"}', "tp=2,pp=4", "--constraint=a&b", "Et*3|(tt|)*29,mL"),
        *("the bearer of news", "a note: one token: two", "sort_key=step", "", "-u PYTHONPATH", "--user 1000:1000"),
        *("a basic model", "https://h/?design=" + 20 * "a", "the key of a map is x", "-u --gpus-per-node=h100:4"),
        *("--mpi=pmix -u --gres=gpu:8", "-u --distribution=block:cyclic", "-u", "--signal=B:USR1@60", "USR1@60"),
        *("B:USR1@60", "--signal=B:TERM@120 --gres=gpu:8", "--userns=keep-id:uid=1"),
        *("--licenses=matlab:4,ansys@flexlm:2", "--licenses=matlab:2@flex_host", "--comment=run:7@teamA"),
        *("run:7@teamA", "--licenses=matlab:4@flexlm.example.com", "10.1.0.1@o2ib:10.1.0.2@o2ib:/lustre"),
        *("mailto:bob@example.com", "HF_TOKEN=${HF_TOKEN}", "--export=ALL,HF_TOKEN=${HF_TOKEN},B=1"),
        *("HF_TOKEN=${HF_TOKEN:-}", "export K_TOKEN=$A$B", "EOS_TOKEN=</s>", "PAD_TOKEN=<pad>"),
        *('MASK_TOKEN="[MASK]"', "HF_TOKEN=<your token>", "BOS_TOKEN=x", "NUM_TOKEN=5", "TOKEN_DISPATCHER=alltoall"),
        *("TOKENS_PER_BATCH=4096", "SORT_KEY=step", "CACHE_KEY=abc", "api_key_env=HF"),
        *("HF_TOKEN_PATH=/home/u/.cache/huggingface/token", "WANDB_API_KEY_FILE=x", "TOKEN_FILE=/a"),
        *("password_file=/a", "GOOGLE_APPLICATION_CREDENTIALS=/x.json", "SSH_KEY=~/.ssh/id_rsa"),
        *("TLS_KEY=/etc/Ssl/Host.pem", "KEYFILE=/k", "DB_PASSWORD=/run/secrets/db", "SSH_KEY=$HOME/.ssh/id_rsa"),
        *("--credentials-file=/a/b", "--user=alice:users", "docker run --user app:app x", "-u nobody:nogroup"),
        *("--container-remap-root --user=a:b", "--reservation=sk-llama3-benchmarks-2026q1"),
        *("sk-this-is-a-long-comment-name-of-somebody", "task-sk-" + 40 * "a", "/data/hf_llama3nemotron405binstruct"),
        *("/data/hf_MetaLlama3170BInstruct/", "hf_meta_llama_3_70b_instruct_sft_v2"),
        *("nvapi-latency-regression-suite-of-the-year", "SORT_KEY this_is_a_long_name_of_field"),
        *("npm_config_cache=x", "credentials: files, or none", "api_key: missing", "bad password: try again"),
        *("next token: foo", "password:", "a password: \n next", "Basic training of 12 steps", "Basic linear"),
        *('{"auth": "kerberos"}', "--token option missing", "mysql -u bob db", "--password to type in"),
        *("mysql -p db", "mysql -p$PW db", "--api-key $KEY1", "sk-learn", "hf_hub_download", 40 * "0f"),
        *("TOKENIZERS_PARALLELISM=false", "model.num_key_heads=4"),
    ],
)
def test_shapes_of_other_things(text: str) -> None:
    assert find_credential(text) is None


def test_an_option_may_stand_before_its_value() -> None:
    assert find_credential_in_words("--mpi pmix --password hunter2")
    assert find_credential_in_words("--export 'ALL,HF_TOKEN=a b'")
    assert find_credential_in_words("-hf hunter2")
    assert find_credential_in_words("--mpi pmix --proxy bob:hunter2@proxy")
    assert not find_credential_in_words("--mpi pmix --container-mount-home --export ALL,HF_TOKEN")
    assert not find_credential_in_words("--licenses matlab:4@flexlm.example.com --user alice:users")


@every("words", [["--hf_token", "hunter2"], ["-x", "-wdk", "hunter2"], ["--api-key", "hunter2", "-x"]])
def test_an_option_may_stand_before_its_value_in_a_list(sentence: Sentence, words: list[str]) -> None:
    line = " ".join(words)
    tables = ({"extra_args": words}, {"extra_args": [line]})
    args = ({"nsys_extra_args": words}, {"nsys_extra_args": line})
    for table in (*({"nsys": each} for each in tables), *({"cmd_args": each} for each in args)):
        with pytest.raises(ValidationError) as refused:
            definition(**table)
        sentence(refused)
        assert "hunter2" not in str(refused.value.errors()[0]["msg"])
        assert refused.value.errors()[0]["loc"][:1] == tuple(table)


@every(
    "line",
    [
        'extra_sbatch_args = ["--hf_token", "hunter2"]',
        'extra_sbatch_args = ["--api-key hunter2"]',
        'extra_srun_args = "--mpi pmix --password hunter2"',
    ],
)
def test_a_message_does_not_repeat_a_credential_after_its_option(tmp_path: Path, sentence: Sentence, line: str) -> None:
    path = tmp_path / "system.toml"
    path.write_text(f'name = "s"\nscheduler = "slurm"\n{line}\ndefault_partition = "p"\n[[partitions]]\nname = "p"\n')
    with pytest.raises(BadInput, match=r"system\.toml:3:") as refused:
        load_system(path)
    sentence(refused)
    assert "hunter2" not in str(refused.value)


@every("words", [["--hf_token", "$HF_TOKEN"], ["--hf_token", "--x"], ["a", "b"], ["--trace", "cuda"], []])
def test_a_list_without_a_credential_is_taken(words: list[str]) -> None:
    assert definition(nsys={"extra_args": words})


def test_a_variable_may_be_named_as_an_address() -> None:
    assert is_secret_variable("http_proxy", "bob:hunter2@proxy")
    assert not is_secret_variable("http_proxy", "proxy:3128")
    assert not is_secret_variable("LICENSES", "matlab:2@flexlm")


@every(
    "part",
    [
        *("//a:", "curl -u ", "sk-", "sk-a ", "proxy=", "a_key: ", "${A", "<", "docker login -p", "://", "://a:b"),
        *("?sig=", "a:b", "A_KEY", "A_KEY=", "--a-", "bearer ", "authorization: ", "eyJ", "x-", "'"),
    ],
)
def test_a_long_text_costs_no_time(part: str) -> None:
    started = time.process_time()
    find_credential(part * (60_000 // len(part)))
    assert time.process_time() - started < 2
