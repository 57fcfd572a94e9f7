"""Fill in the middle: documents cut in three, whose middle comes last (Bavarian et al. 2022, arXiv 2207.14255)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset

from cloudai_mbridge.training.compat.models import NULL
from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.config.finetuning import GPTFIMDatasetConfig
from cloudai_mbridge.training.errors import ConfigError


class Tokens(NamedTuple):
    """The ids of `dataset.fim_extra_tokens`, by its keys."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int


def check_fim(config: GPTFIMDatasetConfig) -> None:
    """Run the checks that need no tokenizer. Raises ConfigError: key, value, remedy."""
    if config.mock:
        raise ConfigError("dataset = GPTFIMDatasetConfig without data: mock samples have no text; set dataset.blend")
    # their document bounds and padding are those before the permutation
    for name, harmless in (("inter_document_masking", False), ("drop_last_partial_validation_sequence", True)):
        if (given := getattr(config, name, harmless)) != harmless:
            raise ConfigError(f"dataset.{name} = {given} does not go with GPTFIMDatasetConfig; use {harmless}")
    rates = ["fim_rate", "fim_spm_rate", *(["fim_fragment_rate"] if config.fim_split_sample else [])]
    for name in rates:
        rate = getattr(config, name)
        if rate is None or not 0 <= rate <= 1:
            raise ConfigError(f"dataset.{name} = {rate}: use a probability, 0 to 1")
    tokens = config.fim_extra_tokens or {}
    if missing := [name for name in Tokens._fields if name not in tokens]:
        raise ConfigError(f"dataset.fim_extra_tokens lacks {', '.join(missing)}; give each a token of the tokenizer")


@dataclass(frozen=True)
class Permuter:
    """Moves the middles of a sample's documents; draws in the order of Megatron-Bridge 0.6."""

    config: GPTFIMDatasetConfig
    tokenizer: Any
    tokens: Tokens
    split: int | None  # the token between the fragments of a document

    @classmethod
    def of(cls, config: GPTFIMDatasetConfig, tokenizer: Any) -> "Permuter":
        """Look the tokens up. Raises ConfigError: the tokenizer lacks one, or has no text."""
        if getattr(tokenizer, "library", None) == NULL:
            raise ConfigError("tokenizer.tokenizer_type: the null one has no text for GPTFIMDatasetConfig; use another")
        given = config.fim_extra_tokens or {}
        ids = (_token_id(tokenizer, given[name], f"fim_extra_tokens[{name!r}]") for name in Tokens._fields)
        split = config.fim_split_sample or None
        return cls(
            config, tokenizer, Tokens(*ids), None if split is None else _token_id(tokenizer, split, "fim_split_sample")
        )

    def permute(self, ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Permute each document of a sample, int64 [n]; cut off or fill up to its length."""
        moved = _each_piece(ids, self.tokens.eod, partial(self._document, random=random))[: len(ids)]
        return np.concatenate([moved, np.full(len(ids) - len(moved), self.tokens.pad, dtype=np.int64)])

    def _document(self, ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Permute a document as a whole, or its fragments, each with `fim_fragment_rate`."""
        if self.split is None or not (ids == self.split).any():
            return self._piece(ids, self.config.fim_rate, random)
        if not random.binomial(1, required(self.config.fim_rate)):
            return ids
        return _each_piece(ids, self.split, partial(self._piece, rate=self.config.fim_fragment_rate, random=random))

    def _piece(self, ids: np.ndarray, rate: Any, random: np.random.RandomState) -> np.ndarray:
        """Cut the text at two characters; return prefix, suffix, middle, or as often as set suffix, prefix, middle."""
        if not len(ids) or not random.binomial(1, rate):
            return ids
        text = self.tokenizer.detokenize(ids.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return ids
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        before, middle, after = map(self.tokenizer.tokenize, (text[:first], text[first:second], text[second:]))
        tokens = self.tokens
        if random.binomial(1, required(self.config.fim_spm_rate)):
            parts = [tokens.prefix, tokens.suffix, *after, tokens.middle, *before, *middle]
        else:
            parts = [tokens.prefix, *before, tokens.suffix, *after, tokens.middle, *middle]
        return np.array(parts, dtype=np.int64)


class GPTFIMDataset(GPTDataset):  # type: ignore[misc]
    """Megatron-Core's GPT dataset with the middles moved.

    A sample depends on `random_seed`, its split and its index alone: not on earlier samples, or on the worker.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._permuter = Permuter.of(self.config, self.config.tokenizer)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        ids, *rest = super()._query_document_sample_shuffle_indices(idx)
        random = np.random.RandomState([self.config.random_seed % 2**32, self.index_split.value, idx])
        return self._permuter.permute(ids, random), *rest


def _each_piece(ids: np.ndarray, separator: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Change the pieces between separators, which stay."""
    found, begin = [], 0
    for end in np.flatnonzero(ids == separator).tolist():
        found += [change(ids[begin:end]), ids[end : end + 1]]
        begin = end + 1
    return np.concatenate([*found, change(ids[begin:])])


def _token_id(tokenizer: Any, token: Any, key: str) -> int:
    """Return the id of a token, which may be given as its id."""
    found = token
    if not isinstance(token, int):
        found = _look_up(tokenizer, token)
        # for unknown tokens, libraries have an id of its own, None, the token or an error
        found = None if found == _look_up(tokenizer, "<no such token>") else found
    if not isinstance(found, int) or not 0 <= found < tokenizer.vocab_size:
        raise ConfigError(f"dataset.{key} = {token!r} is not a token of the tokenizer; use one of its tokens")
    return found


def _look_up(tokenizer: Any, token: str) -> Any:
    try:
        return tokenizer._tokenizer.tokens_to_ids([token])[0]
    except (KeyError, ValueError):
        return None
