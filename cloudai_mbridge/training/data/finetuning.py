"""Fine-tuning data: JSON lines under `dataset_root`, padded or packed."""

import copy
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.data import packing
from cloudai_mbridge.training.data.collate import Pad, StackPacked, length_unit, stack
from cloudai_mbridge.training.data.conversations import Encoder, Sample, SampleOptions
from cloudai_mbridge.training.data.gpt import Datasets
from cloudai_mbridge.training.data.hugging_face import check_source, prepare_files
from cloudai_mbridge.training.data.loader import Collate
from cloudai_mbridge.training.errors import ConfigError

_FILES = {"train": "training.jsonl", "valid": "validation.jsonl", "test": "test.jsonl"}
_SWITCHES = {"valid": "do_validation", "test": "do_test"}


@dataclass(frozen=True)
class FinetuningDataset:
    """Samples of different lengths; `pad_id` fills them up."""

    samples: list[Sample]
    pad_id: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each sample that the model sees."""
        return np.array([len(each.ids) - 1 for each in self.samples])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return one sample: the model's input, and the token to predict after each token.

        The sample of a negative index has no loss: it fills up a batch.
        """
        ids, learned = self.samples[index]
        if index < 0:
            learned = np.zeros_like(learned)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": learned[1:]}


def build_finetuning_datasets(config: ConfigContainer, tokenizer: Any, sizes: Iterable[int | None]) -> Datasets:
    """Read, tokenize and, if requested, pack the splits that are used. Every rank calls it and reads the same files.

    Raises ConfigError: a file is missing, empty or has a line that cannot be used.
    """
    dataset: Any = config.dataset
    if getattr(dataset, "hf_dataset", None) is not None:
        dataset = copy.copy(dataset)
        dataset.dataset_root = prepare_files(dataset)
        config = copy.copy(config)
        config.dataset = dataset
    train, valid, test = (
        _build_split(config, tokenizer, split)
        if count != 0 and getattr(dataset, _SWITCHES.get(split, ""), True)
        else None
        for split, count in zip(_FILES, sizes, strict=True)
    )
    return train, valid, test


def is_packed(dataset: Any) -> bool:
    """Return whether several samples share a sequence: then every pipeline stage needs the boundaries."""
    specs = getattr(dataset, "packed_sequence_specs", None)
    return specs is not None and specs.packed_sequence_size > 0


def collate_for(config: ConfigContainer, dataset: Any) -> Collate:
    """Return the function that collates this dataset's samples.

    Only a whole global batch can be padded to its own longest sample: pipeline stages need one length per step.
    """
    kind: Any = config.dataset
    if isinstance(dataset, packing.PackedDataset):
        fixed = kind.packed_sequence_specs.pad_cu_seqlens
        return StackPacked(dataset.max_boundaries if fixed else None, dataset.longest if fixed else None)
    if not isinstance(dataset, FinetuningDataset):
        return stack
    to_longest = kind.dataloader_type == "batch" and not SampleOptions.of(kind.sample_options).pad_to_max_length
    return Pad(dataset.lengths if to_longest else None, kind.seq_length, _unit(config), dataset.pad_id)


def check_finetuning(config: ConfigContainer) -> None:
    """Run the checks that need no tokenizer. Raises ConfigError: key, value, remedy."""
    dataset: Any = config.dataset
    if getattr(dataset, "hf_dataset", None) is not None:
        check_source(dataset)
    elif dataset.dataset_root is None:
        raise ConfigError(f"dataset.dataset_root is not set: the directory of {_FILES['train']}")
    if dataset.max_train_samples is not None and dataset.max_train_samples < 1:
        raise ConfigError(f"dataset.max_train_samples = {dataset.max_train_samples}: use at least 1, or leave it out")
    try:
        SampleOptions.of(dataset.sample_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dataset.dataset_kwargs: {error}") from error
    if is_packed(dataset):
        size, unit = dataset.packed_sequence_specs.packed_sequence_size, _unit(config)
        if size % unit:
            raise ConfigError(
                f"dataset.packed_sequence_specs.packed_sequence_size = {size} is not a multiple of {unit}, which tensor"
                " and context parallelism need"
            )


def read_lines(path: Path, remedy: str = "") -> list[tuple[int, dict[str, Any]]]:
    """Return the JSON objects of a file with their line numbers; empty lines are left out.

    Raises ConfigError: no such file, nothing in it, or a line that is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; check dataset.dataset_root{remedy}") from error
    lines: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: no JSON: {error}; fix or remove the line") from error
        if not isinstance(value, dict):
            raise ConfigError(f'{path}, line {number}: no JSON object; write {{"input": ..., "output": ...}}')
        lines.append((number, value))
    if not lines:
        raise ConfigError(f'{path} is empty: write one {{"input": ..., "output": ...}} per line{remedy}')
    return lines


def _build_split(config: ConfigContainer, tokenizer: Any, split: str) -> Any:
    dataset: Any = config.dataset
    pad_id = _pad_id(tokenizer)
    if not is_packed(dataset):
        return FinetuningDataset(_encode_split(dataset, tokenizer, split, dataset.seq_length), pad_id)
    specs = dataset.packed_sequence_specs
    limit = min(specs.max_single_sequence_length or dataset.seq_length, specs.packed_sequence_size)
    path = {"train": specs.packed_train_data_path, "valid": specs.packed_val_data_path}.get(split)
    options = packing.PackOptions(
        size=specs.packed_sequence_size,
        unit=packing.sequence_unit(specs.pad_seq_to_mult, config.model.context_parallel_size),
        pad_id=pad_id,
        seed=dataset.seed,
    )
    metadata = specs.packed_metadata_path if split == "train" else None
    return packing.load_or_pack(path, metadata, options, lambda: _encode_split(dataset, tokenizer, split, limit))


def _encode_split(dataset: FinetuningDatasetConfig, tokenizer: Any, split: str, limit: int) -> list[Sample]:
    """Tokenize one file; `limit` is in tokens that the model sees, one less than the ids of a sample."""
    path = Path(str(dataset.dataset_root)) / _FILES[split]
    switch = f", or set dataset.{_SWITCHES[split]}=False" if split in _SWITCHES else ""
    encoder = Encoder(tokenizer, SampleOptions.of(dataset.sample_options), limit + 1)
    lines = read_lines(path, switch)
    samples = []
    for number, line in lines[: dataset.max_train_samples if split == "train" else None]:
        try:
            samples.append(encoder.encode(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; fix or remove the line") from error
    return samples


def _pad_id(tokenizer: Any) -> int:
    """Return the id that fills up; any will do, as it has no loss."""
    for name in ("pad", "eod"):
        with suppress(AttributeError, NotImplementedError):
            if (value := getattr(tokenizer, name)) is not None and value >= 0:
                return int(value)
    return 0


def _unit(config: ConfigContainer) -> int:
    return length_unit(config.model.tensor_model_parallel_size, config.model.context_parallel_size)
