"""Variables of the environment that upstream's recipes set: their `env_vars`, adapted to a point's changes.

Existing values of the job win, as upstream sets a variable only if it is missing
(Megatron-Bridge 0.6.0, `training/config.py`, `apply_environment_variables`).
"""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.megatron_bridge.presets import Preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import System

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR, _RECORD_STREAMS = "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS"
_DOMAIN, _DOMAIN_RANKS = "NVLINK_DOMAIN_SIZE", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_CHUNK = "NCCL_P2P_NET_CHUNKSIZE"
# Before Blackwell, kernels of one queue start in the order of their launch: the overlap of tensor- or context-parallel
# communication relies on that.
_IN_ORDER = ("a100", "h100", "h200", "gh200")
_BLACKWELL = ("b200", "b300", "gb200", "gb300", "vr200", "r100")
_LARGE_CHUNKS = ("llama3_70b", "llama31_405b")


def gpu_label(args: ResolvedCmdArgs, system: System | None) -> str:
    """Return the GPU that a point of the embedded loop is made for, "" if unknown.

    It is the test's `gpu_type`, else the cluster's. The GPUs of this machine do not change a test's training.
    """
    if "gpu_type" in args.model_fields_set:
        return args.gpu_type.lower()
    return system.preset_gpu if system is not None else ""


def recipe_environment(args: ResolvedCmdArgs, gpu: str, preset: Preset | None) -> dict[str, str]:
    """Return the variables that the recipe sets in a job's environment; {} for an unknown GPU.

    args: as they will be trained. preset: without it, or for a release before 0.6, only the connections are set.
    """
    values: Mapping[str, Any] = preset.values if preset else {}
    env: dict[str, str] = dict(text.split("=", 1) for text in values.get("env_vars", ()))
    if not env:
        found = connections(args, gpu)
        return {CONNECTIONS: str(found)} if found else {}
    if _deciding(vars(args)) != _deciding(values):
        env[CONNECTIONS] = str(connections(args, gpu) or env[CONNECTIONS])
    if args.use_megatron_fsdp and env[CONNECTIONS] == "1":  # refused there: rule M24
        env[CONNECTIONS] = "32"
    had_graphs, has_graphs = (
        each not in (None, "", "none") for each in (values.get("cuda_graph_impl"), args.cuda_graph_impl)
    )
    if had_graphs and not has_graphs and _RECORD_STREAMS in env:
        env[_RECORD_STREAMS] = "1"
        if _ALLOCATOR in env:  # older releases of torch reject the option for graphs
            env[_ALLOCATOR] = env[_ALLOCATOR].partition(",graph_capture")[0]
    if args.nccl_ub:
        env |= {"NCCL_NVLS_ENABLE": "1", "NCCL_CTA_POLICY": "1"}
    elif values.get("nccl_ub"):
        env.pop("NCCL_CTA_POLICY", None)
        env |= {"NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}
    if _DOMAIN_RANKS in env:
        env[_DOMAIN_RANKS] = str(min(args.ep or 1, int(env[_DOMAIN])))
    if (args.pp or 1) == 1:
        env.pop(_CHUNK, None)
    elif _has_large_chunks(args):
        env[_CHUNK] = "2097152"
    return env


def connections(args: ResolvedCmdArgs, gpu: str) -> int | None:
    """Return the hardware queues of a GPU that upstream's recipes use, or None for an unknown GPU.

    Source: all performance recipes of Megatron-Bridge 0.6.0; its `scripts/performance/utils/overrides.py`.
    """
    if gpu not in _IN_ORDER:
        return 32 if gpu in _BLACKWELL else None
    if args.use_megatron_fsdp or ((args.tp or 1) == 1 and (args.cp or 1) == 1):
        return 32
    return 8 if args.moe_a2a_overlap else 1


def _has_large_chunks(args: ResolvedCmdArgs) -> bool:
    """Return whether pipeline stages exchange large chunks."""
    if args.task == "sft":
        return args.model_recipe_name.startswith("llama")
    return args.task == "pretrain" and args.model_recipe_name in _LARGE_CHUNKS


def _deciding(values: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return the settings of a layout that decide the connections."""
    return values.get("tp") or 1, values.get("cp") or 1, bool(values.get("moe_a2a_overlap"))
