"""Tokenizers are built from local files, and what is missing is said before anything starts."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.tokenizers import MegatronTokenizer

from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer, check_tokenizer
from tests.cases import every
from tests.golden import Sentence


def build(model_vocab_size: int | None = 512, **fields: Any) -> Any:
    config: Any = SimpleNamespace(
        tokenizer=TokenizerConfig(**fields), model=SimpleNamespace(vocab_size=model_vocab_size)
    )
    return build_tokenizer(config)


@pytest.mark.parametrize("kind", [None, "NullTokenizer"])
def test_the_last_id_of_the_null_tokenizer_is_the_end_of_a_document(kind: Any) -> None:
    assert (build(tokenizer_type=kind).vocab_size, build(tokenizer_type=kind).eod) == (512, 511)
    smaller = build(tokenizer_type=kind, vocab_size=100)
    assert (smaller.vocab_size, smaller.eod) == (100, 99)
    assert build(tokenizer_type=kind, vocab_size=512).vocab_size == 512  # as many ids as the model has


def test_a_null_tokenizer_has_the_ids_that_are_given() -> None:
    ids = {"null_tokenizer_eod_id": 7, "null_tokenizer_pad_id": 8}
    if installed_release() in ("0.16", "0.17"):
        with pytest.raises(
            ConfigError, match=r"null_tokenizer_eod_id = 7 needs Megatron-Core 0.18 or newer; remove it"
        ):
            build(**ids)
        return
    tokenizer = build(**ids)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 7, 8)
    with pytest.raises(ConfigError, match="null_tokenizer_eod_id = 512 is not among the 512 ids; use 0 to 511"):
        build(null_tokenizer_eod_id=512)


def test_a_chat_template_is_read_from_its_file(tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "chat.jinja"
    fields: Any = {"metadata_path": {"library": "byte-level"}, "vocab_size": 300, "chat_template_path": str(path)}
    with pytest.raises(ConfigError, match=r"chat_template_path") as caught:
        check_tokenizer(TokenizerConfig(**fields))
    sentence(caught)
    path.write_text("{{ messages }}")
    assert build(**fields).chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat.jinja': tokenizer.chat_template") as caught:
        build(**fields, chat_template="x")
    sentence(caught)


@pytest.mark.parametrize("as_file", [False, True])
def test_metadata_name_the_library(tmp_path: Path, as_file: bool) -> None:
    metadata: Any = {"library": "byte-level"}
    if as_file:
        (tmp_path / "metadata.json").write_text(json.dumps(metadata))
        metadata = str(tmp_path / "metadata.json")
    tokenizer = build(metadata_path=metadata, vocab_size=300)
    assert tokenizer.tokenize("ab\u00e9") == [97, 98, 195, 169]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (300, 0, 1)
    assert build(metadata_path=metadata, chat_template="{{ messages }}").chat_template == "{{ messages }}"


@every(
    "fields",
    [
        {"tokenizer_type": "MultimodalTokenizer"},
        {"metadata_path": {"library": "words"}},
        {"metadata_path": "nowhere.json"},
        {"tokenizer_model": "llama"},
        {"vocab_size": 600},
    ],
)
def test_what_cannot_be_built_is_refused(sentence: Sentence, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**fields)
    sentence(caught)


@every(
    ("kind", "fields", "options"),
    [
        ("HuggingFaceTokenizer", {"tokenizer_hf_no_use_fast": True, "trust_remote_code": True},
         {"use_fast": False, "trust_remote_code": True}),
        ("HuggingFaceTokenizer", {"tokenizer_hf_no_include_special_tokens": True},
         {"include_special_tokens": False}),
        ("HuggingFaceTokenizer", {"tokenizer_hf_no_use_fast": True, "hf_tokenizer_kwargs": {"use_fast": True}},
         {"use_fast": True}),
        ("SentencePieceTokenizer", {"tokenizer_sentencepiece_legacy": True}, {"legacy": True}),
        ("SentencePieceTokenizer", {"tokenizer_sentencepiece_ignore_extra_whitespaces": False},
         {"ignore_extra_whitespaces": False}),
        ("SentencePieceTokenizer", {"tokenizer_hf_no_use_fast": True}, {}),
    ],
)  # fmt: skip
def test_switches_of_megatron_bridge_reach_the_library(
    kind: str, fields: dict[str, Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(
        MegatronTokenizer,
        "from_pretrained",
        lambda *args, **options: given.append(options) or SimpleNamespace(vocab_size=5),
    )
    build(tokenizer_type=kind, tokenizer_model=str(tmp_path), **fields)
    assert given == [options]


@pytest.mark.parametrize(("is_local", "expected"), [(False, "/cache/org--name/abc"), (True, None)])
def test_a_revision_is_read_from_the_snapshot_of_it(
    is_local: bool, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(model: str, *, revision: str, allow_patterns: list[str]) -> Path:
        assert "tokenizer*" in allow_patterns
        asked.append((model, revision))
        return Path("/cache", model.replace("/", "--"), revision)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    given: list[Any] = []
    monkeypatch.setattr(
        MegatronTokenizer,
        "from_pretrained",
        lambda path, metadata, **options: given.append((path, options)) or SimpleNamespace(vocab_size=5),
    )
    model = str(tmp_path) if is_local else "org/name"
    config = {"tokenizer_model": model, "hf_tokenizer_kwargs": {"revision": "abc", "use_fast": True}}
    build(tokenizer_type="HuggingFaceTokenizer", **config)
    assert given == [(expected or model, {"use_fast": True})]
    assert asked == ([] if is_local else [("org/name", "abc")])


PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}


@every(("kind", "package"), PACKAGES.items())
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, kind: Any, package: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{kind}' needs the package {package}: pip install {package}"):
        check_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model="x"))


@every(("kind", "package"), PACKAGES.items())
def test_missing_files_are_named(monkeypatch: pytest.MonkeyPatch, kind: Any, package: str, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=r"needs tokenizer\.tokenizer_model: its file or directory"):
        check_tokenizer(TokenizerConfig(tokenizer_type=kind))
    with pytest.raises(ConfigError, match=r"no\.model' does not exist; give a path that exists"):
        check_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=tmp_path / "no.model"))


@every(("model", "is_taken"), [("org/name", True), ("./name", False), ("/x/name", False)])
def test_only_hugging_face_takes_a_hub_id(monkeypatch: pytest.MonkeyPatch, model: str, is_taken: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    hub = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
    if is_taken:
        check_tokenizer(hub)
    else:
        with pytest.raises(ConfigError, match="does not exist"):
            check_tokenizer(hub)
    with pytest.raises(ConfigError, match="does not exist"):
        check_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model))


def test_sentencepiece_is_built_from_its_file(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("the sun and the moon shine on the river\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tiny"), vocab_size=19, minloglevel=2
    )
    tokenizer = build(tokenizer_type="SentencePieceTokenizer", tokenizer_model=tmp_path / "tiny.model")
    assert tokenizer.vocab_size == 19
    assert tokenizer.detokenize(tokenizer.tokenize("the moon")) == "the moon"


def test_a_broken_file_is_the_users_to_mend(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "broken.model").write_text("nonsense")
    with pytest.raises(ConfigError, match="SentencePieceTokenizer"):
        build(tokenizer_type="SentencePieceTokenizer", tokenizer_model=tmp_path / "broken.model")
