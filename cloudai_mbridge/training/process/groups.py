"""Process groups of a grid of ranks, handed to Megatron-Core function by function: `dist.use_decentralized_pg`.

The order of ranks is tp-cp-dp-pp, and tp-ep-dp-pp for experts, as in Megatron-Bridge. Megatron-Core's global variables
name the same groups, for its functions that take none. NCCL's flight recorder keeps a group's collectives when one of
them times out.
"""

import logging
import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.dist import DistributedInitConfig

logger = logging.getLogger(__name__)

_PATHS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the second is torch's older name

# Field of the collection -> Megatron-Core's variables for it; some releases lack some of them
_VARIABLES: dict[str, tuple[str, ...]] = {
    "tp": ("_TENSOR_MODEL_PARALLEL_GROUP",),
    "pp": ("_PIPELINE_MODEL_PARALLEL_GROUP",),
    "mp": ("_MODEL_PARALLEL_GROUP",),
    "embd": ("_EMBEDDING_GROUP",),
    "pos_embd": ("_POSITION_EMBEDDING_GROUP",),
    "cp": ("_CONTEXT_PARALLEL_GROUP",),
    "tp_cp": ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP",),
    "tp_dp_cp": ("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",),
    "dp": ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
    "dp_cp": (
        "_DATA_PARALLEL_GROUP_WITH_CP",
        "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    ),
    "ep": ("_EXPERT_MODEL_PARALLEL_GROUP",),
    "expt_tp": ("_EXPERT_TENSOR_PARALLEL_GROUP",),
    "tp_ep": ("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",),
    "tp_ep_pp": (
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    ),
    "expt_dp": (
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    ),
}
# Field -> the variable for its global ranks
_RANKS = {
    "tp": "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
    "pp": "_PIPELINE_GLOBAL_RANKS",
    "mp": "_MODEL_PARALLEL_GLOBAL_RANKS",
    "dp": "_DATA_PARALLEL_GLOBAL_RANKS",
    "dp_cp": "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
    "cp": "_CONTEXT_PARALLEL_GLOBAL_RANKS",
    "ep": "_EXPERT_MODEL_PARALLEL_RANKS",
    "embd": "_EMBEDDING_GLOBAL_RANKS",
    "pos_embd": "_POSITION_EMBEDDING_GLOBAL_RANKS",
}

_own: ProcessGroupCollection | None = None


def grid_groups() -> ProcessGroupCollection | None:
    """Return the groups of this run's grid; None if Megatron-Core's own are used, or the grid's are gone."""
    is_up = _own is not None and _own.tp is mpu.get_tensor_model_parallel_group(check_initialized=False)
    return _own if is_up else None


def make_grid_groups(config: ConfigContainer) -> None:
    """Make the groups of the grid. torch.distributed must be up, Megatron-Core's groups not. A collective."""
    global _own
    model: Any = config.model
    backend, timeout = config.dist.distributed_backend, timedelta(minutes=config.dist.distributed_timeout_minutes)
    world = dist.get_world_size()
    tp, pp, cp = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    etp, ep = model.expert_tensor_parallel_size or tp, model.expert_model_parallel_size or 1
    dense = HyperCommGrid([tp, cp, world // (tp * cp * pp), pp], ["tp", "cp", "dp", "pp"], backend=backend)
    experts = HyperCommGrid([etp, ep, world // (etp * ep * pp), pp], ["tp", "ep", "dp", "pp"], backend=backend)

    def of(grid: Any, *dimensions: str) -> Any:
        return grid.create_pg(list(dimensions), timeout=timeout)

    made = {name: of(dense, *name.split("_")) for name in ("tp", "cp", "pp", "dp", "tp_cp", "dp_cp", "tp_dp_cp")}
    made |= {"mp": of(dense, "tp", "pp"), "intra_dp_cp": made["dp_cp"], "hcp": None}
    made |= {"ep": of(experts, "ep"), "expt_tp": of(experts, "tp"), "expt_dp": of(experts, "dp")}
    made |= {"tp_ep": of(experts, "tp", "ep"), "tp_ep_pp": of(experts, "tp", "ep", "pp")}
    made |= {"intra_expt_dp": made["expt_dp"], "inter_dist_opt": None, "intra_dist_opt": None}
    pipelines: list[list[int]] = dense._gen_rank_enum(["pp"])
    new_subgroups: Any = dist.new_subgroups_by_enumeration
    for name, enumeration in (
        ("embd", [embedding_ranks(model, ranks) for ranks in pipelines]),
        ("pos_embd", [ranks[:1] for ranks in pipelines]),
    ):
        made[name], _ = new_subgroups(enumeration, backend=backend, timeout=timeout)
    _own = ProcessGroupCollection(**made)
    for field, names in _VARIABLES.items():
        for name in names:
            _set(name, getattr(_own, field))
    for field, name in _RANKS.items():
        if (group := getattr(_own, field)) is not None:
            _set(name, dist.get_process_group_ranks(group))
    _set("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", dist.group.WORLD)
    groups = {id(group): group for group in vars(_own).values() if group is not None}
    _set("_global_process_group_list", [None, *groups.values()])  # groups whose timeouts change; None: the default
    if (stages := model.virtual_pipeline_model_parallel_size) is not None:
        mpu.set_virtual_pipeline_model_parallel_rank(0)
        mpu.set_virtual_pipeline_model_parallel_world_size(stages)
    mpu._set_global_memory_buffer()


def embedding_ranks(model: Any, pipeline: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embeddings: first, output if tied, multi-token prediction.

    model: a user's own may lack the fields; it is taken to be tied.
    pipeline: global ranks, in order of stages.
    """
    held = {pipeline[0]}
    if getattr(model, "share_embeddings_and_output_weights", True):
        held.add(pipeline[-1])
    return sorted(held.union(pipeline[index] for index in _stages_with_mtp(model)))


def predicts_tokens(model: Any) -> bool:
    """Return whether this pipeline rank holds the multi-token prediction, which embeds the tokens again."""
    ranks = range(mpu.get_pipeline_model_parallel_world_size())
    return mpu.get_pipeline_model_parallel_rank() in {ranks[index] for index in _stages_with_mtp(model)}


def _stages_with_mtp(model: Any) -> list[int]:
    """Return the pipeline ranks of the multi-token prediction: the layout's, without a layout the last, -1."""
    if not getattr(model, "mtp_num_layers", None):
        return []
    if (layout := getattr(model, "pipeline_model_parallel_layout", None)) is None:
        return [-1]
    return [index for index, stages in enumerate(layout.layout) if any(LayerType.mtp in stage for stage in stages)]


def _set(name: str, value: Any) -> None:
    if hasattr(mpu, name):
        setattr(mpu, name, value)


def set_flight_recorder(config: DistributedInitConfig, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch reads when the process group starts; nothing without a path, here or there.

    Variables of the environment win, with a warning if they differ.
    """
    given = [env[name] for name in _PATHS if env.get(name)]
    path = given[0] if given else config.flight_recorder_dump_path
    if not path:
        return
    wanted = dict.fromkeys(_PATHS, path) | {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(config.flight_recorder_trace_buffer_size),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(config.flight_recorder_dump_on_timeout)),
        "TORCH_INCLUDE_STACK_TRACE": str(int(config.flight_recorder_include_stack_trace)),
        "TORCH_INCLUDE_ONLY_ACTIVE": str(int(config.flight_recorder_include_only_active)),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": str(int(config.flight_recorder_extra_dump_on_exec)),
    }
    for name, value in wanted.items():
        if (there := env.setdefault(name, value)) != value:
            logger.warning("%s=%s in the environment: %s of the configuration is not used", name, there, value)
