"""Megatron-Core's GPT datasets: mock samples, and blends of indexed files; also filled in the middle.

Fill in the middle: documents cut in three, whose middle comes last (Bavarian et al. 2022, arXiv 2207.14255).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state as mpu
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split

from cloudai_mbridge.training.compat.models import NULL
from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.config.dataset import GPTDatasetConfig as GPTConfig
from cloudai_mbridge.training.config.finetuning import GPTFIMDatasetConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.groups import predicts_tokens

Datasets = tuple[Any | None, Any | None, Any | None]


def build_gpt_datasets(config: GPTConfig, model: Any, tokenizer: Any, sizes: Sequence[int | None]) -> Datasets:
    """Build the splits that samples are drawn from; sample i is the same on every rank and layout.

    Every rank calls it: rank 0 builds the indices of real files and writes them to the cache, the others read them.
    Pipeline ranks that read none get None. Raises ConfigError: Megatron-Core lacks its
    compiled helpers, a split has not enough tokens, or the cache that `fast_cache_load` relies on is not built.
    """
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "dataset: Megatron-Core was installed without its compiled dataset helpers; install its wheel, or"
            " use dataset=SyntheticGPTDatasetConfig"
        ) from error
    config = copy.copy(config)
    config.tokenizer = tokenizer
    config.create_attention_mask = config.create_attention_mask and not config.skip_getting_attention_mask_from_dataset
    # splits that no sample is drawn from are neither built nor required
    name = "split_matrix" if config.blend_per_split is None else "blend_per_split"
    parts = zip(getattr(config, name), sizes, strict=True)  # in the order of Split
    setattr(config, name, [None if size == 0 else part for part, size in parts])
    kind: type[Any] = gpt_dataset.MockGPTDataset if config.mock else gpt_dataset.GPTDataset
    if isinstance(config, GPTFIMDatasetConfig):
        permuter(config, tokenizer)  # which checks, on every rank, that the tokenizer has the tokens
        kind = GPTFIMDataset
    _check_splits(config)
    builder = BlendedMegatronDatasetBuilder(kind, list(sizes), partial(reads_samples, config, model), config)
    try:
        train, valid, test = builder.build()
    except Exception as error:
        missing: BaseException | None = error
        while missing is not None and not isinstance(missing, FileNotFoundError):  # the error of mock data wraps it
            missing = missing.__cause__ or missing.__context__
        if not config.fast_cache_load or missing is None:
            raise
        raise _no_cache(config, str(missing.filename)) from error
    for dataset in (train, valid, test):
        for each in (dataset, *getattr(dataset, "datasets", ())):
            for name, path in vars(each).items() if each is not None else ():
                # of indices that are read with the first sample, `defer_npy_index_mmap`
                if name.startswith("path_to_") and name.endswith("_index") and not Path(path).is_file():
                    raise _no_cache(config, path)
    return train, valid, test


def _no_cache(config: GPTConfig, path: str) -> ConfigError:
    given = [name for name in ("fast_cache_load", "defer_npy_index_mmap") if getattr(config, name)]
    return ConfigError(
        f"dataset.path_to_cache = {config.path_to_cache!r}: {Path(path).name} is not there, and"
        f" dataset.{' and '.join(given)} = True builds nothing; build the cache in a run without"
    )


def check_blend_files(config: GPTConfig) -> None:
    """Check that the indexed files of every path are there. Raises ConfigError: one is missing."""
    for _, prefix, _ in _sources(config):
        for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
            if not path.is_file():
                raise ConfigError(f"dataset: {path} does not exist; give paths without .bin and .idx")


def _check_splits(config: GPTConfig) -> None:
    """Check, on every rank alike, that each file has a sample for each of its splits.

    Megatron-Core searches an empty split without end, and on rank 0 only.
    """
    needed = config.sequence_length + int(config.add_extra_token_to_sequence)
    for split, prefix, (begin, end) in _sources(config):
        indexed = gpt_dataset.GPTDataset.build_low_level_dataset(prefix, config)
        lengths = indexed.sequence_lengths  # a view of the file, which is unmapped along with `indexed`
        first, last = (round(bound * float(len(lengths))) for bound in (begin, end))
        tokens = int(lengths[first : min(last, first + needed)].sum())  # more documents need not be counted
        if tokens < needed:
            raise ConfigError(
                f"dataset: {prefix}: the {split.name} split ({config.split}) holds {tokens} tokens, and one sample"
                f" takes {needed}; give it more in dataset.split, or do without it (validation.eval_iters=0)"
            )


def _sources(config: GPTConfig) -> Iterator[tuple[Split, str, tuple[float, float]]]:
    """Yield split, path and range of the documents [0, 1] of every local file; object storage is left out."""
    matrix: Any = config.split_matrix
    for split in Split:
        blend, bounds = config.blend, matrix and matrix[split.value]
        if config.blend_per_split is not None:
            blend, bounds = config.blend_per_split[split.value], (0.0, 1.0)
        if blend is not None and bounds is not None:
            yield from ((split, prefix, bounds) for prefix in blend[0] if not is_object_storage_path(prefix))


def reads_samples(dataset: Any, model: Any) -> bool:
    """Return whether this pipeline rank reads samples: the first, the last, and that with multi-token prediction.

    The others only use samples that limit attention: by a mask, or by the bounds of their documents.
    """
    has_masks = not getattr(dataset, "skip_getting_attention_mask_from_dataset", True)
    is_end = mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True)
    limits_attention = has_masks or getattr(dataset, "inter_document_masking", False)
    return bool(is_end or limits_attention or predicts_tokens(model))


_FIM_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")  # keys of `dataset.fim_extra_tokens`


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
    if missing := [name for name in _FIM_TOKENS if name not in tokens]:
        raise ConfigError(f"dataset.fim_extra_tokens lacks {', '.join(missing)}; give each a token of the tokenizer")


def permuter(config: GPTFIMDatasetConfig, tokenizer: Any) -> Callable[[np.ndarray, np.random.RandomState], np.ndarray]:
    """Return a function that moves the middles of a sample's documents; it draws in the order of Megatron-Bridge 0.6.

    Raises ConfigError: the tokenizer lacks one of the tokens, or has no text.
    """
    if getattr(tokenizer, "library", None) == NULL:
        raise ConfigError("tokenizer.tokenizer_type: the null one has no text for GPTFIMDatasetConfig; use another")
    given = config.fim_extra_tokens or {}
    tokens = {name: _token_id(tokenizer, given[name], f"fim_extra_tokens[{name!r}]") for name in _FIM_TOKENS}
    separator = config.fim_split_sample  # between the fragments of a document
    split = _token_id(tokenizer, separator, "fim_split_sample") if separator else None

    def permute(ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Permute each document of a sample, int64 [n]; cut off or fill up to its length."""
        moved = _each_piece(ids, tokens["eod"], partial(permute_document, random=random))[: len(ids)]
        return np.concatenate([moved, np.full(len(ids) - len(moved), tokens["pad"], dtype=np.int64)])

    def permute_document(ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Permute a document as a whole, or its fragments, each with `fim_fragment_rate`."""
        if split is None or not (ids == split).any():
            return permute_piece(ids, config.fim_rate, random)
        if not random.binomial(1, required(config.fim_rate)):
            return ids
        return _each_piece(ids, split, partial(permute_piece, rate=config.fim_fragment_rate, random=random))

    def permute_piece(ids: np.ndarray, rate: Any, random: np.random.RandomState) -> np.ndarray:
        """Cut the text at two characters; return prefix, suffix, middle, or as often as set suffix, prefix, middle."""
        if not len(ids) or not random.binomial(1, rate):
            return ids
        text = tokenizer.detokenize(ids.tolist())
        if config.fim_no_prefix is not None and text.startswith(config.fim_no_prefix):
            return ids
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        before, middle, after = map(tokenizer.tokenize, (text[:first], text[first:second], text[second:]))
        begin, then_middle, then_suffix = (tokens[name] for name in ("prefix", "middle", "suffix"))
        if random.binomial(1, required(config.fim_spm_rate)):
            parts = [begin, then_suffix, *after, then_middle, *before, *middle]
        else:
            parts = [begin, *before, then_suffix, *after, then_middle, *middle]
        return np.array(parts, dtype=np.int64)

    return permute


class GPTFIMDataset(GPTDataset):  # type: ignore[misc]
    """Megatron-Core's GPT dataset with the middles moved.

    A sample depends on `random_seed`, its split and its index alone: not on earlier samples, or on the worker.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._permute = permuter(self.config, self.config.tokenizer)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        ids, *rest = super()._query_document_sample_shuffle_indices(idx)
        random = np.random.RandomState([self.config.random_seed % 2**32, self.index_split.value, idx])
        return self._permute(ids, random), *rest


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
