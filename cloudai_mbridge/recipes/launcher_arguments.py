"""Arguments that set several fields at once, as upstream's launcher does.

Source: Megatron-Bridge 0.6.0, scripts/performance/utils/overrides.py and recipes/utils/determinism_utils.py.
"""

from typing import Any

from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, TASKS, ResolvedCmdArgs
from cloudai_mbridge.training.schema.known_names import OPTIMIZER_DTYPES

OPTIMIZERS = {"adam": "adam", "muon": "dist_muon"}
_LONGEST_S = 65535  # of sbatch --signal
# Variables that a deterministic training needs
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


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


def set_dense_layers(model: dict[str, Any], first: int | None) -> None:
    """Make the first layers dense, and put experts into all others."""
    if first is not None:
        model["moe_layer_freq"] = [int(layer >= first) for layer in range(model["num_layers"])]


def set_optimizer(data: dict[str, Any], kind: str | None) -> None:
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


def set_deterministic(data: dict[str, Any], is_on: bool | None) -> None:
    """Disable operations that may differ between two runs of the same training."""
    if is_on:
        data["model"] |= {"deterministic_mode": True, "cross_entropy_loss_fusion": False}
        if "comm_overlap" in data:
            data["comm_overlap"]["tp_comm_overlap"] = False


def leave_on_signal(data: dict[str, Any], seconds: int | None) -> None:
    """Save and exit on the signal that Slurm sends before the time limit."""
    if seconds is not None:
        data["train"]["exit_signal_handler"] = True


def register_buffers(ddp: dict[str, Any]) -> None:
    """Add the companion settings of NCCL's user buffers: the kernels that use them have no average."""
    if ddp.get("nccl_ub"):
        ddp["average_in_collective"] = False
        if ddp.get("use_megatron_fsdp"):
            ddp["fsdp_manual_registration"] = True


def limit_experts(model: dict[str, Any], wanted: bool | None) -> None:
    """Limit every expert to its share of the tokens, or lift its limit and force balance. Rule E09 requires experts."""
    if wanted is not None and model.get("num_moe_experts"):
        model["moe_expert_capacity_factor"] = 1.0 if wanted else None
        model["moe_pad_expert_input_to_capacity"] = wanted
        model["moe_router_force_load_balancing"] = not wanted
