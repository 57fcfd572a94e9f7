"""Megatron-Core's GPT datasets: mock samples, and blends of indexed files."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split

from cloudai_mbridge.training.config.dataset import GPTDatasetConfig as GPTConfig
from cloudai_mbridge.training.config.finetuning import GPTFIMDatasetConfig
from cloudai_mbridge.training.data.fim import GPTFIMDataset, Permuter
from cloudai_mbridge.training.errors import ConfigError

Datasets = tuple[Any | None, Any | None, Any | None]


def build_gpt_datasets(config: GPTConfig, tokenizer: Any, sizes: Sequence[int | None]) -> Datasets:
    """Build the splits that samples are drawn from; sample i is the same on every rank and layout.

    Every rank calls it: rank 0 builds the indices of real files and writes them to the cache, the others read them.
    Middle pipeline stages get None, unless samples limit attention. Raises ConfigError: Megatron-Core lacks its
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
    _drop_unused_splits(config, sizes)
    kind = _kind(config)
    _check_splits(config)
    builder = BlendedMegatronDatasetBuilder(kind, list(sizes), partial(reads_samples, config), config)
    try:
        train, valid, test = builder.build()
    except Exception as error:
        missing = _missing_file(error)
        if not config.fast_cache_load or missing is None:
            raise
        raise _no_cache(config, str(missing.filename)) from error
    for dataset in (train, valid, test):
        _check_cache(config, dataset)
    return train, valid, test


def _kind(config: GPTConfig) -> type[Any]:
    """Return the class of the splits. Raises ConfigError, on every rank: the tokenizer lacks a token."""
    if isinstance(config, GPTFIMDatasetConfig):
        Permuter.of(config, config.tokenizer)
        return GPTFIMDataset
    kind: type[Any] = gpt_dataset.MockGPTDataset if config.mock else gpt_dataset.GPTDataset
    return kind


def _missing_file(error: BaseException | None) -> FileNotFoundError | None:
    """Return the missing file in an error's chain of causes, None without one: the error of mock data wraps it."""
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error


def _check_cache(config: GPTConfig, dataset: Any) -> None:
    """Check that the indices that are read with the first sample, `defer_npy_index_mmap`, are built."""
    for each in (dataset, *getattr(dataset, "datasets", ())):
        for name, path in vars(each).items() if each is not None else ():
            if name.startswith("path_to_") and name.endswith("_index") and not Path(path).is_file():
                raise _no_cache(config, path)


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


def is_end_stage() -> bool:
    """Return whether this is the first or the last pipeline stage: middle stages read no data."""
    return bool(mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(ignore_virtual=True))


def limits_attention(dataset: Any) -> bool:
    """Return whether samples limit the tokens that attention sees: by a mask, or by the bounds of their documents."""
    has_masks = not getattr(dataset, "skip_getting_attention_mask_from_dataset", True)
    return bool(getattr(dataset, "inter_document_masking", False) or has_masks)


def reads_samples(dataset: Any) -> bool:
    """Return whether this pipeline stage reads samples: middle stages only use samples that limit attention."""
    return is_end_stage() or limits_attention(dataset)


def _drop_unused_splits(config: Any, sizes: Sequence[int | None]) -> None:
    """Drop the splits that no sample is drawn from: they are neither built nor required."""
    name = "split_matrix" if config.blend_per_split is None else "blend_per_split"
    parts = zip(getattr(config, name), sizes, strict=True)  # in the order of Split
    setattr(config, name, [None if size == 0 else part for part, size in parts])
