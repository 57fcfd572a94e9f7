"""Fine-tuning data: JSON lines under `dataset_root`, padded or packed. Data sets of Hugging Face become such files."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.sft import GPTSFTDatasetConfig, HFDatasetSourceConfig
from cloudai_mbridge.training.data.gpt import Datasets
from cloudai_mbridge.training.data.loader import Collate, pad, stack, stack_packed
from cloudai_mbridge.training.data.samples import (
    PackedDataset,
    Sample,
    SampleOptions,
    encode,
    load_or_pack,
    pack,
    sequence_unit,
)
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.atomic import write_bytes

_CACHE = Path("~/.cache/cloudai_mbridge/datasets")
Row = dict[str, Any]

# The text data sets that Megatron-Bridge 0.6 finds by name
_KNOWN = {
    "squad": HFDatasetSourceConfig(path_or_dataset="rajpurkar/squad", schema_adapter="squad"),
    "gsm8k": HFDatasetSourceConfig(path_or_dataset="openai/gsm8k", schema_adapter="gsm8k", subset="main"),
    "openmathinstruct2": HFDatasetSourceConfig(
        path_or_dataset="nvidia/OpenMathInstruct-2", schema_adapter="openmathinstruct2", split="train_1M"
    ),
    "tulu3": HFDatasetSourceConfig(path_or_dataset="allenai/tulu-3-sft-mixture"),
}


# Adapter of rows -> their prompt and answer
_PAIRS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "squad": lambda row: (
        f"Context: {row['context']} Question: {row['question']} Answer:",
        str(row["answers"]["text"][0]),
    ),
    "gsm8k": lambda row: (f"Question: {row['question']} Answer:", str(row["answer"])),
    "openmathinstruct2": lambda row: (f"Problem: {row['problem']} Solution:", str(row["generated_solution"])),
}


def prepare_files(dataset: GPTSFTDatasetConfig) -> Path:
    """Write the used splits that are missing, and return their directory. Every rank calls it.

    Raises ConfigError: the data cannot be had, or not written; on every rank.
    """
    if dataset.hf_output_root is not None:
        root = Path(dataset.hf_output_root)
    else:
        facts = json.dumps(dataset.source_facts(), sort_keys=True, default=str)
        root = _CACHE.expanduser() / hashlib.sha256(facts.encode()).hexdigest()[:16]
    failure: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            _write_splits(dataset, root)
        except Exception as error:  # of the package, the network, the disk or a row
            failure[0] = f"dataset.hf_dataset: {type(error).__name__}: {' '.join(str(error).split())}"
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ConfigError(failure[0])
    return root


def _write_splits(dataset: GPTSFTDatasetConfig, root: Path) -> None:
    source = dataset.hf_dataset
    assert source is not None
    is_used = {"training": True, "validation": dataset.do_validation, "test": dataset.do_test}
    missing = [
        name for name in is_used if is_used[name] and (dataset.hf_rewrite or not (root / f"{name}.jsonl").exists())
    ]
    share = dataset.hf_validation_proportion
    rows: dict[str, list[Row]] = {}
    if share is not None and dataset.do_validation and {"training", "validation"} & {*missing}:
        from datasets import Dataset

        split = Dataset.from_list(_rows(dataset, source)).train_test_split(test_size=share, seed=dataset.seed)
        rows = {"training": list(split["train"]), "validation": list(split["test"])}
    given = {"validation": dataset.hf_validation_dataset, "test": dataset.hf_test_dataset}
    for name in missing:
        if name not in rows:
            rows[name] = _rows(dataset, given.get(name) or source, None if name == "training" else name)
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows[name])
        root.mkdir(parents=True, exist_ok=True)
        write_bytes(root / f"{name}.jsonl", text.encode())


def _rows(dataset: GPTSFTDatasetConfig, source: HFDatasetSourceConfig, split: str | None = None) -> list[Row]:
    """Load a source and return its rows as `sample_options` reads them. split: of a source without a split."""
    import datasets

    known = _resolve(source)
    subsets = source.subset if isinstance(source.subset, list) else [source.subset or known.subset or None]
    chosen = source.split or split or known.split or "train"
    parts = [
        datasets.load_dataset(
            str(known.path_or_dataset), *([] if each is None else [each]), split=chosen, **(source.load_kwargs or {})
        )
        for each in subsets
    ]
    loaded = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if known.schema_adapter is None:
        return [dict(row) for row in loaded]
    options = dataset.sample_options
    keys = options.get("input_key", "input"), options.get("label_key", "output")
    return [dict(zip(keys, _PAIRS[known.schema_adapter](row), strict=True)) for row in loaded]


def _resolve(source: HFDatasetSourceConfig) -> HFDatasetSourceConfig:
    """Return the source that a known name stands for, or the source itself.

    Raises ConfigError: unknown name or adapter.
    """
    if source.dataset_name is not None:
        if source.dataset_name not in _KNOWN:
            raise ConfigError(
                f"dataset.hf_dataset.dataset_name = {source.dataset_name!r} is unknown; use {', '.join(_KNOWN)},"
                " or path_or_dataset"
            )
        return _KNOWN[source.dataset_name]
    if source.schema_adapter is not None and source.schema_adapter not in _PAIRS:
        raise ConfigError(
            f"dataset.hf_dataset.schema_adapter = {source.schema_adapter!r} is unknown; use {', '.join(_PAIRS)}"
        )
    return source


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


def has_packed_sequences(dataset: Any) -> bool:
    """Return whether attention ends within a sequence: with a sample that shares it, or with a document."""
    return is_packed(dataset) or bool(getattr(dataset, "inter_document_masking", False))


def collate_for(config: ConfigContainer, dataset: Any) -> Collate:
    """Return the function that collates this dataset's samples.

    Only a whole global batch can be padded to its own longest sample: pipeline stages need one length per step.
    """
    kind: Any = config.dataset
    if isinstance(dataset, PackedDataset):
        if not kind.packed_sequence_specs.pad_cu_seqlens:
            return stack_packed
        return partial(stack_packed, boundaries=dataset.max_boundaries, longest=dataset.longest)
    if not isinstance(dataset, FinetuningDataset):
        return stack
    to_longest = kind.dataloader_type == "batch" and not SampleOptions.of(kind.sample_options).pad_to_max_length
    lengths = dataset.lengths if to_longest else None
    return partial(pad, lengths=lengths, limit=kind.seq_length, unit=_unit(config), pad_id=dataset.pad_id)


def check_finetuning(config: ConfigContainer) -> None:
    """Run the checks that need no tokenizer. Raises ConfigError: key, value, remedy."""
    dataset: Any = config.dataset
    if getattr(dataset, "hf_dataset", None) is not None:
        for source in filter(None, (dataset.hf_dataset, dataset.hf_validation_dataset, dataset.hf_test_dataset)):
            _resolve(source)
        if find_spec("datasets") is None:
            raise ConfigError("dataset.hf_dataset needs the package datasets; install it, or set dataset.dataset_root")
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
    pad_id = 0  # any will do, as padding has no loss
    for name in ("pad", "eod"):
        with suppress(AttributeError, NotImplementedError):
            if (value := getattr(tokenizer, name)) is not None and value >= 0:
                pad_id = int(value)
                break
    if not is_packed(dataset):
        return FinetuningDataset(_encode_split(dataset, tokenizer, split, dataset.seq_length), pad_id)
    specs = dataset.packed_sequence_specs
    size = specs.packed_sequence_size
    limit = min(specs.max_single_sequence_length or dataset.seq_length, size)
    unit = sequence_unit(specs.pad_seq_to_mult, config.model.context_parallel_size)
    path = {"train": specs.packed_train_data_path, "valid": specs.packed_val_data_path}.get(split)
    metadata = specs.packed_metadata_path if split == "train" else None

    def make() -> np.ndarray:
        samples = _encode_split(dataset, tokenizer, split, limit)
        return pack(samples, size, unit=unit, pad_id=pad_id, seed=dataset.seed)

    return load_or_pack(path, metadata, size, make)


def _encode_split(dataset: FinetuningDatasetConfig, tokenizer: Any, split: str, limit: int) -> list[Sample]:
    """Tokenize one file; `limit` is in tokens that the model sees, one less than the ids of a sample."""
    path = Path(str(dataset.dataset_root)) / _FILES[split]
    switch = f", or set dataset.{_SWITCHES[split]}=False" if split in _SWITCHES else ""
    options = SampleOptions.of(dataset.sample_options)
    lines = read_lines(path, switch)
    samples = []
    for number, line in lines[: dataset.max_train_samples if split == "train" else None]:
        try:
            samples.append(encode(line, tokenizer, options, limit + 1))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; fix or remove the line") from error
    return samples


def _unit(config: ConfigContainer) -> int:
    """Return the number that must divide a sequence length: tensor parallelism splits each context-parallel half."""
    cp: int = config.model.context_parallel_size
    return int(config.model.tensor_model_parallel_size) * (2 * cp if cp > 1 else 1)
