"""Data set and tokenizer that the arguments name, with the options that upstream's launcher gives them.

Source: Megatron-Bridge 0.6.0, scripts/performance/utils/datasets.py and overrides.py.
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

_CONFIG = "cloudai_mbridge.training.config"
_GPT, _FINETUNING = f"{_CONFIG}.dataset.GPTDatasetConfig", f"{_CONFIG}.finetuning.FinetuningDatasetConfig"
_SPLIT = "99990,8,2"  # train, validation, test
_C4_VALIDATION = "c4-validation-91205-samples.en_text_document"
_C4_SHARDS, _C4_WEIGHT = (6,), 50.0
# data -> its required and its optional arguments
_ARGUMENTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mock": ((), ()),
    "rp2": (("dataset_paths", "index_mapping_dir"), ()),
    "c4": (("c4_root",), ("c4_train_shards", "index_mapping_dir")),
    "squad": (("dataset_root",), ("packed_sequence",)),
    "squad_packed": (("dataset_root",), ("packed_sequence",)),
}
OF_DATA = tuple(dict.fromkeys(name for needed, others in _ARGUMENTS.values() for name in (*needed, *others)))
# tokenizer_type -> whether it needs tokenizer_model
_TOKENIZERS = {"NullTokenizer": False, "HuggingFaceTokenizer": True, "SentencePieceTokenizer": True}


def wrong_data(args: ResolvedCmdArgs) -> tuple[str, str, str] | None:
    """Return the argument that does not fit `data` or `tokenizer_type`, the problem, and the remedy."""
    if (data := args.data) is not None:
        if data not in _ARGUMENTS:
            return "data", f"data set {data!r} is unknown", f"use one of {', '.join(_ARGUMENTS)}"
        needed, others = _ARGUMENTS[data]
        for name in OF_DATA:
            value = getattr(args, name)
            if name in needed and not value:
                return name, f"data = {data!r} needs {name}", f"set {name}"
            if value and name not in (*needed, *others):
                return name, f"{name} has no effect with data = {data!r}", f"remove {name}, or set another data"
    return _wrong_tokenizer(args)


def _wrong_tokenizer(args: ResolvedCmdArgs) -> tuple[str, str, str] | None:
    kind, name = args.tokenizer_type, "tokenizer_model"
    if kind is None:
        return None
    if kind not in _TOKENIZERS:
        return "tokenizer_type", f"tokenizer {kind!r} is unknown", f"use one of {', '.join(_TOKENIZERS)}"
    if _TOKENIZERS[kind] is bool(args.tokenizer_model):
        return None
    if _TOKENIZERS[kind]:
        return name, f"{kind} needs {name}", f"set {name} to its file or directory"
    return name, f"{name} has no effect with {kind}", f"remove {name}"


def set_data(data: dict[str, Any], args: ResolvedCmdArgs) -> None:
    """Put the data set and the tokenizer that the arguments name into a container. args: valid arguments."""
    if args.data in ("rp2", "c4"):
        base = {**data["dataset"], "_target_": _GPT, "split": _SPLIT, "path_to_cache": args.index_mapping_dir}
        own = _c4(args) if args.data == "c4" else {"data_path": args.dataset_paths}
        data["dataset"] = {**base, **own}
    elif args.data in ("squad", "squad_packed"):
        data["dataset"] = _squad(data, args)
    if args.tokenizer_type == "NullTokenizer":
        data["tokenizer"] = {"tokenizer_type": args.tokenizer_type, "vocab_size": data["model"]["vocab_size"]}
    elif args.tokenizer_type is not None:
        data["tokenizer"] = {"tokenizer_type": args.tokenizer_type, "tokenizer_model": args.tokenizer_model}


def _c4(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the blend of the C4 shards; validation and test share one file, as in MLPerf's reference."""
    given = args.c4_train_shards
    shards = _C4_SHARDS if given is None else given if isinstance(given, list) else (given,)
    train = [f"{args.c4_root}/c4-train.en_{shard}_text_document" for shard in shards]
    held_out = [[f"{args.c4_root}/{_C4_VALIDATION}"], None]
    return {"blend_per_split": [[train, [_C4_WEIGHT] * len(train)], held_out, held_out], "split": None}


def _squad(data: Mapping[str, Any], args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the fine-tuning data set in a directory: prompts and answers as JSON lines."""
    model = data["model"]
    found: dict[str, Any] = {
        "_target_": _FINETUNING,
        "dataset_root": args.dataset_root,
        "seq_length": model["seq_length"],
        "seed": 5678,
        "do_test": False,
        "dataloader_type": "single",
        "num_workers": data["dataset"]["num_workers"],
    }
    if args.data == "squad_packed" or args.packed_sequence:
        cp = model["context_parallel_size"]
        found["packed_sequence_specs"] = {
            "_target_": f"{_CONFIG}.finetuning.PackedSequenceSpecs",
            "packed_sequence_size": model["seq_length"],
            "pad_seq_to_mult": 2 * cp if cp > 1 else 1,
            "pad_cu_seqlens": model.get("cuda_graph_impl", "none") != "none",
        }
        found["dataset_kwargs"] = {"pad_to_max_length": True}
    return found
