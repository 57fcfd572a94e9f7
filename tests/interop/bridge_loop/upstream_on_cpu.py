"""Megatron-Bridge's training loop on a CPU. Its files are untouched; what is replaced at run time is in this module.

Ours is `cloudai_mbridge.training.cpu`, around which both loops run: devices named "cuda" mean the CPU.
"""

import functools
import importlib
import sys
import warnings
from typing import Any

from tests.interop.absent_packages import stand_in_for

# What of Megatron-Core looks for kernels and is imported by Megatron-Bridge: it has to find that there are none
LOOKS_FOR_KERNELS = (
    "extensions.transformer_engine",
    "dist_checkpointing.strategies.nvrx",
    "fp8_utils",
    "fusions.fused_layer_norm",
    "models.gpt.gpt_layer_specs",
    "models.gpt.experimental_attention_variant_module_specs",
    "models.mamba.mamba_layer_specs",
    "optimizer.distrib_optimizer",
    "post_training.modelopt.gpt.model_specs",
    "ssm.mamba_mixer",
    "ssm.gated_delta_net",
    "transformer.moe.experts",
)
# What Megatron-Bridge imports, and does not use in these runs; more stand-ins would mislead transformers
ABSENT = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "fla", "megatron.energon")


def install() -> None:
    """Import Megatron-Bridge so that it trains here. Call it again without effect; our loop needs another process."""
    if "megatron.bridge" in sys.modules:
        return
    from cloudai_mbridge.training import cpu

    cpu.install()
    warnings.filterwarnings("ignore")
    import_core()
    stand_in_for(ABSENT)
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    setup: Any = importlib.import_module("megatron.bridge.training.setup")
    # It asserts that there is a GPU; `setup` has no argument for the one that allows none
    setup.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize._set_random_seed = functools.partial(_seed, initialize._set_random_seed)
    initialize.compile_helpers = lambda: None  # the wheel contains them compiled, and no Makefile
    for name in ("train", "eval"):  # a stand-in of ModelOpt answers where None means that nothing is distilled
        module: Any = importlib.import_module(f"megatron.bridge.training.{name}")
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **options: None
    setup.setup_data_iterators = functools.partial(_without_draws, setup.setup_data_iterators)
    for name in ("pretrain", "gpt_step", "callbacks"):
        importlib.import_module(f"megatron.bridge.training.{name}")


def import_core() -> None:
    """Import what looks for kernels, before stand-ins of packages would mislead it."""
    for name in LOOKS_FOR_KERNELS:
        _try(f"megatron.core.{name}")


def _try(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # without kernels it is not importable, and not used
        return


def _without_draws(plain: Any, *args: Any, **options: Any) -> Any:
    """Leave torch's generator as it was: a loader draws its seed from it, and on a GPU dropout has another one."""
    import torch

    with torch.random.fork_rng(devices=[]):
        return plain(*args, **options)


def _seed(plain: Any, seed: int, *args: Any, pg_collection: Any, **options: Any) -> None:
    """Seed the tracker of tensor parallelism too, which Megatron-Bridge does only where it finds a GPU."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    plain(seed, *args, pg_collection=pg_collection, **options)
    stage = dist.get_group_rank(pg_collection.pp, dist.get_rank())
    ranks = {"tp_rank": pg_collection.tp, "ep_rank": pg_collection.ep, "etp_rank": pg_collection.expt_tp}
    model_parallel_cuda_manual_seed(seed + 100 * stage, **{name: group.rank() for name, group in ranks.items()})
