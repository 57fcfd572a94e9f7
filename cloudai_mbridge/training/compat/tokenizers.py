"""Megatron-Core's null tokenizer: 0.17 renamed its library, 0.18 counts the end of a document into its size."""

import inspect
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer, megatron_tokenizer
from megatron.core.tokenizers.text.libraries import NullTokenizer

NULL = "null-text" if "null-text" in getattr(megatron_tokenizer, "TEXT_LIBRARIES", ()) else "null"

_COUNTS_ITS_END = "eod_id" in inspect.signature(NullTokenizer).parameters


def build_null_tokenizer(num_ids: int, metadata: dict[str, Any]) -> Any:
    """Build a tokenizer of `num_ids` ids; the last is the end of a document, as in Megatron-Bridge 0.3 and 0.6."""
    size = num_ids if _COUNTS_ITS_END else num_ids - 1
    return MegatronTokenizer.from_pretrained(None, {**metadata, "library": NULL}, vocab_size=size)
