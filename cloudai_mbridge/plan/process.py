"""Environment of the training process, from its arguments: variables, profiler, clocks and cores of its nodes.

Source: Megatron-Bridge 0.6.0, scripts/performance/setup_experiment.py, perf_plugins.py and utils/executors.py.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs, names_in
from cloudai_mbridge.models.test_definition import NsysConfiguration
from cloudai_mbridge.training.startup.variables import BINDING, DUMP

# Extent and time of profiling as in upstream's launcher and NeMo-Run; CUPTI's hardware tracing does not work there
_NSYS = {"sample": "none", "trace": "cuda-sw,nvtx", "force_overwrite": True, "cuda_graph_trace": "node"}
_NSYS |= {"capture_range": "cudaProfilerApi", "capture_range_end": "stop"}
_NSYS_ARGS, _SQLITE = ["--cuda-event-trace=false"], "--export=sqlite"

_LEAST_NUMA_GPUS = ("gb200", "gb300", "vr200")  # two GPUs to a NUMA node, else four
# On B300 every rank has two cores of its own, except in these model families
_SHARED_CORES = {"llama", "kimi"}


def variables_of(args: ResolvedCmdArgs, gpu: str) -> dict[str, str]:
    """Return the variables that arguments set. gpu: as `gpu_label` returns it."""
    found = {"NEMO_HOME": args.nemo_home, "HF_HUB_OFFLINE": "1" if args.offline else None}
    found |= {DUMP: "1" if args.dump_env else None}
    found |= {BINDING: _binding(args, gpu) if args.enable_pct_binding else None}
    return {name: value for name, value in found.items() if value}


def _binding(args: ResolvedCmdArgs, gpu: str) -> str:
    """Return how many ranks share a NUMA node, and how many cores each has of its own, as N or N,CORES."""
    ranks = 2 if gpu in _LEAST_NUMA_GPUS else 4
    return f"{ranks},2" if gpu == "b300" and not _shares_cores(args) else str(ranks)


def _shares_cores(args: ResolvedCmdArgs) -> bool:
    """Return whether upstream binds no cores for a model on B300."""
    if args.task == "pretrain" and args.model_family_name in _SHARED_CORES:
        return True
    if args.model_recipe_name == "deepseek_v3":
        return args.config_variant != "large_scale"
    return args.model_recipe_name == "nemotron_3_super" and args.compute_dtype == "bf16"


def mounts_of(args: ResolvedCmdArgs) -> tuple[str, ...]:
    """Return the mounts that arguments need."""
    return (f"{args.nemo_home}:{args.nemo_home}",) if args.nemo_home else ()


def profiler_of(table: NsysConfiguration | None, args: ResolvedCmdArgs) -> tuple[str, ...]:
    """Return the words before the program that has it profiled: of the [nsys] table, and of the arguments."""
    if table is not None and not table.enable:
        table = None
    if not args.enable_nsys:
        return () if table is None else table.command
    own: dict[str, object] = {} if table is None else table.model_dump(exclude_unset=True)
    values: dict[str, object] = {**_NSYS, **own}
    if trace := names_in(args.nsys_trace):
        values["trace"] = ",".join(trace)
    if args.profiling_gpu_metrics:
        values["gpu_metrics_devices"] = "all"
    more = _words(args.nsys_extra_args)
    if args.export_nsys_sqlite and not _exports_sqlite(more):
        more.append(_SQLITE)
    values["extra_args"] = [*more, *_NSYS_ARGS, *(table.extra_args if table else ())]
    return NsysConfiguration.model_validate(values).command


def _words(given: str | Sequence[str] | None) -> list[str]:
    texts = given.split(",") if isinstance(given, str) else given or ()
    return [word for text in texts if (word := text.strip())]


def _exports_sqlite(words: Sequence[str]) -> bool:
    """Return whether options of nsys export SQLite already."""
    values = [word.partition("=")[2] for word in words if word.startswith("--export=")]
    values += [after for word, after in pairwise(words) if word == "--export"]
    return any("sqlite" in value.split(",") for value in values)


def node_commands_of(args: ResolvedCmdArgs) -> tuple[str, ...]:
    """Return the commands that set the clocks of a node's GPUs. They last beyond the job, as upstream's do."""
    clocks: Mapping[str, object] = {
        "boost-slider --vboost 1": args.enable_vboost,
        f"-lgc {args.lock_gpu_freq}": args.lock_gpu_freq is not None,
        f"-lmc {args.peak_mem_clk},{args.peak_mem_clk}": args.peak_mem_clk not in (None, -1),
    }
    return tuple(f"sudo nvidia-smi {options}" for options, is_set in clocks.items() if is_set)
