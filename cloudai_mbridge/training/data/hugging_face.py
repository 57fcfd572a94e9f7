"""Data sets of Hugging Face for fine-tuning: rank 0 writes their rows to the files that all ranks read."""

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from cloudai_mbridge.training.config.sft import GPTSFTDatasetConfig, HFDatasetSourceConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.atomic import write_bytes

_CACHE = Path("~/.cache/cloudai_mbridge/datasets")
Row = dict[str, Any]


class _Known(NamedTuple):
    path: str
    adapter: str | None = None
    split: str = "train"
    subset: str | None = None


# The text data sets that Megatron-Bridge 0.6 finds by name
_KNOWN = {
    "squad": _Known("rajpurkar/squad", "squad"),
    "gsm8k": _Known("openai/gsm8k", "gsm8k", subset="main"),
    "openmathinstruct2": _Known("nvidia/OpenMathInstruct-2", "openmathinstruct2", split="train_1M"),
    "tulu3": _Known("allenai/tulu-3-sft-mixture"),
}


def _squad(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"Context: {row['context']} Question: {row['question']} Answer:", str(row["answers"]["text"][0])


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"Question: {row['question']} Answer:", str(row["answer"])


def _math(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"Problem: {row['problem']} Solution:", str(row["generated_solution"])


_PAIRS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "squad": _squad,
    "gsm8k": _gsm8k,
    "openmathinstruct2": _math,
}


def check_source(dataset: GPTSFTDatasetConfig) -> None:
    """Run the checks that need no data. Raises ConfigError: unknown name or adapter, or missing package."""
    for source in filter(None, (dataset.hf_dataset, dataset.hf_validation_dataset, dataset.hf_test_dataset)):
        _resolve(source)
    if dataset.hf_dataset is not None and find_spec("datasets") is None:
        raise ConfigError("dataset.hf_dataset needs the package datasets; install it, or set dataset.dataset_root")


def prepare_files(dataset: GPTSFTDatasetConfig) -> Path:
    """Write the used splits that are missing, and return their directory. Every rank calls it.

    Raises ConfigError: the data cannot be had, or not written; on every rank.
    """
    root = _root(dataset)
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


def _root(dataset: GPTSFTDatasetConfig) -> Path:
    if dataset.hf_output_root is not None:
        return Path(dataset.hf_output_root)
    facts = json.dumps(dataset.source_facts(), sort_keys=True, default=str)
    return _CACHE.expanduser() / hashlib.sha256(facts.encode()).hexdigest()[:16]


def _write_splits(dataset: GPTSFTDatasetConfig, root: Path) -> None:
    source = dataset.hf_dataset
    assert source is not None
    missing = [name for name in ("training", "validation", "test") if _is_wanted(dataset, root, name)]
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


def _is_wanted(dataset: GPTSFTDatasetConfig, root: Path, name: str) -> bool:
    is_used = {"validation": dataset.do_validation, "test": dataset.do_test}.get(name, True)
    return is_used and (dataset.hf_rewrite or not (root / f"{name}.jsonl").exists())


def _rows(dataset: GPTSFTDatasetConfig, source: HFDatasetSourceConfig, split: str | None = None) -> list[Row]:
    """Load a source and return its rows as `sample_options` reads them. split: of a source without a split."""
    import datasets

    known = _resolve(source)
    subsets = source.subset if isinstance(source.subset, list) else [source.subset or known.subset]
    chosen = source.split or split or known.split
    parts = [
        datasets.load_dataset(known.path, *([] if each is None else [each]), split=chosen, **(source.load_kwargs or {}))
        for each in subsets
    ]
    loaded = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if known.adapter is None:
        return [dict(row) for row in loaded]
    options = dataset.sample_options
    keys = options.get("input_key", "input"), options.get("label_key", "output")
    return [dict(zip(keys, _PAIRS[known.adapter](row), strict=True)) for row in loaded]


def _resolve(source: HFDatasetSourceConfig) -> _Known:
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
    return _Known(str(source.path_or_dataset), source.schema_adapter)
