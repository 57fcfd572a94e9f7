"""Type and source of the tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_TokenizerType = Literal[
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
    "NullTokenizer",
    "SFTTokenizer",
]


@dataclass
class TokenizerConfig:
    """Kind, files and options of the tokenizer; `tokenizer_model` is a file or a Hugging Face name."""

    metadata_path: str | dict[str, Any] | None = None
    vocab_size: int | None = None  # before padding; None: the tokenizer's own
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_extra_ids: int = 0
    tokenizer_type: _TokenizerType | None = None
    tokenizer_model: str | Path | None = None
    special_tokens: list[str] | None = None
    chat_template: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: list[str] | None = None
    tokenizer_prompt_format: str | None = None
    image_tag_type: str | None = None
    force_system_message: bool | None = False
    hf_tokenizer_kwargs: dict[str, Any] | None = field(default_factory=dict)
    sp_tokenizer_kwargs: dict[str, Any] | None = field(default_factory=dict)
    use_tokenizer_vocab_size: bool = False  # the model takes it, whatever model.vocab_size is
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = True
    null_tokenizer_eod_id: int | None = None  # of a null tokenizer; None: the last id
    null_tokenizer_pad_id: int = -1  # -1: a null tokenizer has none
    chat_template_path: str | None = None  # a file that holds `chat_template`
