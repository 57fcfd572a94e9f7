"""Build the run's tokenizer from local files."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer

from cloudai_mbridge.training.compat.models import build_null_tokenizer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.tokenizers.config import TokenizerConfig

# tokenizer_type -> Megatron-Core's library
_LIBRARIES = {
    None: "null",
    "NullTokenizer": "null",
    "HuggingFaceTokenizer": "huggingface",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
# library -> the package that it needs
_PACKAGES = {"huggingface": "transformers", "sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}
# field -> the library's option, and its value if the field is not at its default
_HF_SWITCHES = {
    "tokenizer_hf_no_use_fast": ("use_fast", False),
    "tokenizer_hf_no_include_special_tokens": ("include_special_tokens", False),
    "trust_remote_code": ("trust_remote_code", True),
}
_SP_SWITCHES = {
    "tokenizer_sentencepiece_legacy": ("legacy", True),
    "tokenizer_sentencepiece_ignore_extra_whitespaces": ("ignore_extra_whitespaces", False),
}
_NO_FILES = ("null", "byte-level")
# Files of a model on Hugging Face that a tokenizer is read from: no weights
_SNAPSHOT = (
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*"),
    *("*.model", "*.spm", "*.tiktoken", "*.py", "*.jinja", "chat_template*", "chat_templates/*"),
)
_REVISION = "revision"  # of `hf_tokenizer_kwargs`
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")


def build_tokenizer(config: Any) -> Any:
    """Build the tokenizer; of the null one's `vocab_size` ids the last is the end of a document.

    config: a ConfigContainer or a TokenizerConfig. With a container, the tokenizer is checked against the model, whose
    size a null tokenizer takes if it has none.
    `tokenizer.metadata_path` names the library if no type is given: a table such as {"library": "byte-level"}, or
    a file that Megatron-Core wrote.

    Raises ConfigError: a type that is not built, a missing file or package, more ids than the model has.
    """
    if isinstance(config, TokenizerConfig):
        return _build(config, None)
    tokenizer = _build(config.tokenizer, config.model)
    known = getattr(config.model, "vocab_size", None)
    if known is not None and tokenizer.vocab_size > known:
        raise ConfigError(
            f"model.vocab_size = {known}: the tokenizer has {tokenizer.vocab_size} ids; use at least that many"
        )
    return tokenizer


def check_tokenizer(config: TokenizerConfig) -> None:
    """Check kind, package and files, without building. Raises ConfigError: key, value, remedy."""
    _, library = _metadata(config)
    if (package := _PACKAGES.get(library)) and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{_asked(config)} needs the package {package}: pip install {package}")
    if library in _NO_FILES:
        return
    model = config.tokenizer_model
    if model is None:
        raise ConfigError(f"{_asked(config)} needs tokenizer.tokenizer_model: its file or directory")
    if Path(model).exists() or (library == "huggingface" and _HUB_ID.fullmatch(str(model))):
        return
    raise ConfigError(f"tokenizer.tokenizer_model = '{model}' does not exist; give a path that exists")


def _build(config: TokenizerConfig, model: Any) -> Any:
    check_tokenizer(config)
    metadata, library = _metadata(config)
    path = None if config.tokenizer_model is None or library in _NO_FILES else str(config.tokenizer_model)
    options = _options(config, library, model)
    try:
        if library == "null":
            ids = (config.null_tokenizer_eod_id, config.null_tokenizer_pad_id)
            return build_null_tokenizer(options["vocab_size"], metadata, *ids)
        revision = options.pop(_REVISION, None) if library == "huggingface" else None
        # as in Megatron-Bridge 0.6, not of a path: Megatron-Core's tokenizer takes no revision
        if revision is not None and path is not None and not Path(path).exists():
            from huggingface_hub import snapshot_download

            path = str(snapshot_download(path, revision=revision, allow_patterns=list(_SNAPSHOT)))
        return MegatronTokenizer.from_pretrained(path, metadata, **options)
    except ConfigError:
        raise
    except Exception as error:  # whatever a library raises, its files or options are at fault
        detail = " ".join(str(error).split())
        raise ConfigError(f"{_asked(config)}: {detail} ({type(error).__name__})") from error


def _metadata(config: TokenizerConfig) -> tuple[dict[str, Any], str]:
    """Return Megatron-Core's metadata, and the library that they name."""
    if config.metadata_path is not None and config.tokenizer_type is None:
        given = config.metadata_path
        try:
            metadata = given if isinstance(given, dict) else json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer.metadata_path = {given!r} cannot be read: {error}") from error
        if not isinstance(metadata, dict):
            raise ConfigError(f"tokenizer.metadata_path = {given!r} holds no JSON object")
        library = metadata.get("library")
        if library not in (*_NO_FILES, *_PACKAGES):
            choices = ", ".join((*_NO_FILES, *_PACKAGES))
            raise ConfigError(f"tokenizer.metadata_path: library {library!r} is not built; use one of {choices}")
        return {**metadata, **_given(chat_template=_chat_template(config))}, str(library)
    if config.tokenizer_type is None and config.tokenizer_model is not None:
        raise ConfigError(
            f"tokenizer.tokenizer_model = '{config.tokenizer_model}' is not read without tokenizer.tokenizer_type;"
            " set that too, such as 'HuggingFaceTokenizer'"
        )
    if config.tokenizer_type not in _LIBRARIES:
        choices = ", ".join(name for name in _LIBRARIES if name)
        raise ConfigError(f"{_asked(config)} is not built; use one of {choices}")
    library = _LIBRARIES[config.tokenizer_type]
    return {"library": library, "chat_template": _chat_template(config)}, library


def _chat_template(config: TokenizerConfig) -> str | None:
    path = config.chat_template_path
    if path is None:
        return config.chat_template
    where = f"tokenizer.chat_template_path = {path!r}"
    if config.chat_template is not None:
        raise ConfigError(f"{where}: tokenizer.chat_template is set too; remove one of them")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _options(config: TokenizerConfig, library: str, model: Any) -> dict[str, Any]:
    special = None if config.special_tokens is None else list(config.special_tokens)
    if library == "null":
        size = config.vocab_size or getattr(model, "vocab_size", None)
        if size is None or size < 1:
            raise ConfigError("tokenizer.vocab_size: a null tokenizer needs it if model.vocab_size is not set either")
        return {"vocab_size": size}
    if library == "byte-level":
        return _given(special_tokens=special, vocab_size=config.vocab_size)
    if library == "sentencepiece":
        given = _given(special_tokens=special)
        return {**given, **_switches(config, _SP_SWITCHES), **(config.sp_tokenizer_kwargs or {})}
    if library == "huggingface":
        files = _given(vocab_file=config.vocab_file, merges_file=config.merge_file)
        return {**files, **_switches(config, _HF_SWITCHES), **(config.hf_tokenizer_kwargs or {})}
    given = _given(
        pattern=config.tiktoken_pattern, special_tokens=config.tiktoken_special_tokens, vocab_size=config.vocab_size
    )
    return {"num_special_tokens": config.tiktoken_num_special_tokens, **given}


def _switches(config: TokenizerConfig, fields: dict[str, tuple[str, bool]]) -> dict[str, bool]:
    """Return the options of those fields of Megatron-Bridge 0.6 that are not at their defaults."""
    defaults = TokenizerConfig()
    return {
        option: value for field, (option, value) in fields.items() if getattr(config, field) != getattr(defaults, field)
    }


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _asked(config: TokenizerConfig) -> str:
    if config.tokenizer_type is None and config.metadata_path is not None:
        return f"tokenizer.metadata_path = {config.metadata_path!r}"
    return f"tokenizer.tokenizer_type = {config.tokenizer_type!r}"
