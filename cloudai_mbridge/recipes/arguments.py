"""Arguments that set several fields at once, as upstream's launcher does: data, tokenizer, optimizer, sharding.

Source: Megatron-Bridge 0.6.0, scripts/performance/utils/datasets.py and overrides.py, and
recipes/utils/determinism_utils.py.
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, TASKS, ResolvedCmdArgs
from cloudai_mbridge.training.schema.known_names import OPTIMIZER_DTYPES

OPTIMIZERS = {"adam": "adam", "muon": "dist_muon"}
_LONGEST_S = 65535  # of sbatch --signal
# Variables that a deterministic training needs
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

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


def wrong_value(args: ResolvedCmdArgs) -> tuple[str, str, str] | None:
    """Return an argument with an invalid value, the problem, and the remedy; None if all are valid."""
    kind, seconds = args.optimizer_type, args.preempt_time
    if args.task not in TASKS:
        return "task", f"task {args.task!r} is unknown", f"use one of {', '.join(TASKS)}"
    if args.task in ADAPTER_TASKS and args.use_megatron_fsdp:
        return "use_megatron_fsdp", "adapters do not train with Megatron-FSDP", "remove it, or set task = 'sft'"
    if kind is not None and kind not in OPTIMIZERS:
        return "optimizer_type", f"optimizer {kind!r} is unknown", f"use one of {', '.join(OPTIMIZERS)}"
    if seconds is not None and not 0 <= seconds <= _LONGEST_S:
        return "preempt_time", f"Slurm takes 0 to {_LONGEST_S} seconds", "use one of these"
    return None


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


def set_companions(data: dict[str, Any], args: ResolvedCmdArgs, *, has_checkpoints: bool) -> None:
    """Set the fields of a container that accompany arguments, which are valid.

    has_checkpoints: the training saves or loads some.
    """
    model, ddp = data["model"], data["ddp"]
    is_sharded, overlap = ddp.get("use_megatron_fsdp"), data.get("comm_overlap")
    if args.task in ADAPTER_TASKS:
        if model["pipeline_model_parallel_size"] > 1 and not is_sharded:
            data.setdefault("dist", {})["use_tp_pp_dp_mapping"] = True
        if overlap:
            overlap.pop("delay_wgrad_compute", None)  # frozen weights have no gradients
    _set_data(data, args)
    _set_optimizer(data, args.optimizer_type)
    if args.deterministic:
        model |= {"deterministic_mode": True, "cross_entropy_loss_fusion": False}
        if overlap is not None:
            overlap["tp_comm_overlap"] = False
    if args.preempt_time is not None:  # save and exit on the signal that Slurm sends before the time limit
        data["train"]["exit_signal_handler"] = True
    if is_sharded:
        _shard_parameters(data, has_checkpoints)
    else:
        ddp.pop("use_megatron_fsdp", None)
    if model.get("cpu_offloading_num_layers"):  # the activations of the first layers, in the host's memory
        model |= {"cpu_offloading": True, "cpu_offloading_weights": False}
    else:
        model.pop("cpu_offloading_num_layers", None)
    if ddp.get("nccl_ub"):
        ddp["average_in_collective"] = False  # the kernels that use these buffers have no average
        if is_sharded:
            ddp["fsdp_manual_registration"] = True
    # Limit every expert to its share of the tokens, or lift its limit and force balance. Rule E09 requires experts
    if args.use_tokendrop is not None and model.get("num_moe_experts"):
        model["moe_expert_capacity_factor"] = 1.0 if args.use_tokendrop else None
        model["moe_pad_expert_input_to_capacity"] = args.use_tokendrop
        model["moe_router_force_load_balancing"] = not args.use_tokendrop


def _set_data(data: dict[str, Any], args: ResolvedCmdArgs) -> None:
    if args.data in ("rp2", "c4"):
        data["dataset"] |= {"_target_": _GPT, "split": _SPLIT, "path_to_cache": args.index_mapping_dir}
        if args.data == "rp2":
            data["dataset"]["data_path"] = args.dataset_paths
        else:  # validation and test share one file, as in MLPerf's reference
            given = args.c4_train_shards
            shards = _C4_SHARDS if given is None else given if isinstance(given, list) else (given,)
            train = [f"{args.c4_root}/c4-train.en_{shard}_text_document" for shard in shards]
            held_out = [[f"{args.c4_root}/{_C4_VALIDATION}"], None]
            blend = [[train, [_C4_WEIGHT] * len(train)], held_out, held_out]
            data["dataset"] |= {"blend_per_split": blend, "split": None}
    elif args.data in ("squad", "squad_packed"):
        data["dataset"] = _squad(data, args)
    if args.tokenizer_type == "NullTokenizer":
        data["tokenizer"] = {"tokenizer_type": args.tokenizer_type, "vocab_size": data["model"]["vocab_size"]}
    elif args.tokenizer_type is not None:
        data["tokenizer"] = {"tokenizer_type": args.tokenizer_type, "tokenizer_model": args.tokenizer_model}


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


def _set_optimizer(data: dict[str, Any], kind: str | None) -> None:
    """Choose the optimizer. Muon shards its own state: gradients are reduced in fp32 and no parameters gathered."""
    if kind is None:
        return
    optimizer = data["optimizer"]
    optimizer["optimizer"] = OPTIMIZERS[kind]
    if kind == "adam":
        return
    for name in ("use_precision_aware_optimizer", *OPTIMIZER_DTYPES):
        optimizer.pop(name, None)
    optimizer["use_distributed_optimizer"] = False
    data["ddp"] |= {"use_distributed_optimizer": False, "overlap_param_gather": False, "grad_reduce_in_fp32": True}
    if data["mixed_precision"]:
        data["mixed_precision"]["grad_reduce_in_fp32"] = True


def _shard_parameters(data: dict[str, Any], has_checkpoints: bool) -> None:
    """Shard parameters, gradients and the optimizer's state over the data-parallel ranks, with Megatron-FSDP."""
    data["ddp"] |= {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    data["ddp"] |= {"keep_fp8_transpose_cache": False, "average_in_collective": False}
    data["optimizer"]["use_distributed_optimizer"] = True
    data["model"]["init_model_with_meta_device"] = True
    if data.get("comm_overlap", {}).get("defer_embedding_wgrad_compute"):
        data["comm_overlap"]["defer_embedding_wgrad_compute"] = False
    if has_checkpoints:
        data["checkpoint"].setdefault("ckpt_format", "fsdp_dtensor")  # the only format that it saves and loads


def check_adapters(data: Mapping[str, Any], args: ResolvedCmdArgs) -> None:
    """Raise BadInput for adapters without weights to adapt, and for settings of missing adapters."""
    if args.task in ADAPTER_TASKS:
        if not data["checkpoint"].get("pretrained_checkpoint"):
            raise BadInput(f"cmd_args.task = {args.task!r} needs the weights to adapt; set pretrained_checkpoint")
    elif (peft := data.get("peft")) and "_target_" not in peft:
        raise BadInput(f"extra_cmd_args: peft.{next(iter(peft))} has no effect without adapters; set task = 'lora'")
