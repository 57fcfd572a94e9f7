"""Megatron-Core's null tokenizer: 0.17 renamed its library, 0.18 includes the end of a document in its size."""

import inspect
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer, megatron_tokenizer
from megatron.core.tokenizers.text.libraries import NullTokenizer

from cloudai_mbridge.training.errors import ConfigError

NULL = "null-text" if "null-text" in getattr(megatron_tokenizer, "TEXT_LIBRARIES", ()) else "null"

_COUNTS_ITS_END = "eod_id" in inspect.signature(NullTokenizer).parameters


def build_null_tokenizer(num_ids: int, metadata: dict[str, Any], eod_id: int | None = None, pad_id: int = -1) -> Any:
    """Build a tokenizer of `num_ids` ids; the last is the end of a document, as in Megatron-Bridge 0.3 and 0.6.

    eod_id, pad_id: other ids than the last and none, from 0.18 on.

    ConfigError: an id out of range, or an older release.
    """
    given = {"null_tokenizer_eod_id": eod_id, "null_tokenizer_pad_id": None if pad_id == -1 else pad_id}
    for name, value in given.items():
        if value is not None and not 0 <= value < num_ids:
            raise ConfigError(f"tokenizer.{name} = {value} is not among the {num_ids} ids; use 0 to {num_ids - 1}")
        if value is not None and not _COUNTS_ITS_END:
            raise ConfigError(f"tokenizer.{name} = {value} needs Megatron-Core 0.18 or newer; remove it")
    options = {"eod_id": eod_id, "pad_id": pad_id} if _COUNTS_ITS_END else {}
    size = num_ids if _COUNTS_ITS_END else num_ids - 1
    return MegatronTokenizer.from_pretrained(None, {**metadata, "library": NULL}, vocab_size=size, **options)
