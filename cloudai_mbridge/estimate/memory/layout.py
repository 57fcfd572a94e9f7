"""The layout of an estimate: the distribution of the model over GPUs, adapters, and the storage formats."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from pydantic import PlainSerializer

from cloudai_mbridge.errors import BadInput, NotModelled
from cloudai_mbridge.estimate.hardware import Precision

LORA, DORA, CANONICAL = "LoRA", "DoRA", "CanonicalLoRA"
_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_up", "linear_fc1_gate")}
_CANONICAL_TARGETS = (*_PARTS["linear_qkv"], *_PARTS["linear_fc1"], "linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Adapters:
    """The kind, and fields of `training.peft.config`. target_modules: (): all linear layers but `exclude_modules`."""

    kind: str = LORA
    target_modules: tuple[str, ...] = _TARGETS
    exclude_modules: tuple[str, ...] = ()
    dim: int = 32
    normalize_moe_lora: bool = False
    share_expert_adapters: bool = True
    sequence_parallel_input_regather: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput for values that no adapters have."""
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1:
            raise BadInput(f"peft.dim = {self.dim!r} is not a rank; use at least 1")
        for name in ("normalize_moe_lora", "share_expert_adapters", "sequence_parallel_input_regather"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"peft.{name} = {getattr(self, name)!r} is not true or false; correct it")

    @property
    def of_single_layers(self) -> tuple[str, ...]:
        """The targets that are modules of some layers only; they are counted in all layers."""
        return tuple(name for name in self.target_modules if "*" in name or "." in name)

    def require_model(self) -> None:
        """Raise NotModelled if the memory of the adapters is not modelled."""
        if self.kind not in (LORA, DORA, CANONICAL):
            raise NotModelled(
                f"peft: adapters of the kind {self.kind!r} are not modelled; use LoRA, DoRA or CanonicalLoRA"
            )
        for name in self.exclude_modules:
            if "*" in name or "." in name:
                raise NotModelled(f"peft: exclusion of single layers ({name!r}) is not modelled; name modules alone")
        for name in self.of_single_layers:
            if "*" in _module(name):
                raise NotModelled(f"peft: {name!r} may be any module, which is not modelled; name modules alone")

    def parts_of(self, linear: str, parts: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the parts of a linear layer that have an adapter each: a layer in one piece itself; () for none.

        parts: names of the parts of a fused layer, which only `CanonicalLoRA` adapts one by one.
        """
        targets = tuple(map(_module, self.target_modules))
        if not targets:
            is_left = linear not in self.exclude_modules and linear != "router"
            return () if not is_left else parts if self.kind == CANONICAL and parts else (linear,)
        if self.kind == CANONICAL and parts:
            return tuple(part for part in parts if part in targets)
        if self.kind == CANONICAL and any(part in targets for part in _PARTS.get(linear, ())):
            return (linear,)  # in one piece, whichever of its parts is named
        return (linear,) if linear in targets else ()


def _module(target: str) -> str:
    """Return the module that a target names, whatever its layers."""
    return target.rpartition(".")[2]


# Fields that `extra_cmd_args` may set
FIELDS = frozenset(field.name for field in fields(Adapters)) - {"kind"}


def adapters_of(section: Mapping[str, Any], base: Adapters | None = None) -> Adapters:
    """Return the adapters of a section `peft`, or `base` with its changes. BadInput: they are not modelled."""
    kind = str(section["_target_"]).rpartition(".")[2] if "_target_" in section else base.kind if base else LORA
    if base is None:
        base = Adapters(kind, _CANONICAL_TARGETS if kind == CANONICAL else _TARGETS)
    given = {name: value for name, value in section.items() if name in FIELDS}
    for name in ("target_modules", "exclude_modules"):
        if (value := given.get(name, ())) is not None and not isinstance(value, (list, tuple)):
            raise BadInput(f"peft.{name} = {value!r} is not a list; write it as ['linear_qkv']")
        given |= {name: tuple(map(str, value or ()))} if name in given else {}
    return replace(base, kind=kind, **given)


MASTER_WEIGHTS = 12  # bytes that Adam keeps per 16-bit weight: a 32-bit copy and two moments


class Implementation(StrEnum):
    """Modules of a layer; they decide about the tensors saved for the backward pass.

    FUSED: Transformer Engine, flash attention and fused kernels: the estimate for GPUs. TORCH: the embedded loop where
    Transformer Engine is not installed.
    """

    FUSED = "fused"
    TORCH = "torch"


class Granularity(StrEnum):
    """Recomputation in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


RECOMPUTE_METHODS = ("uniform", "block")
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation, in Megatron-Core's words.

    method and num_layers belong to "full": "uniform" keeps one input per `num_layers` layers, "block" recomputes the
    first `num_layers` layers of every model chunk. modules belongs to "selective".
    """

    granularity: Granularity = Granularity.NONE
    modules: Annotated[frozenset[str], PlainSerializer(sorted, list[str])] = frozenset()
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        """Raise BadInput for settings that Megatron-Core does not support."""
        if self.method not in RECOMPUTE_METHODS:
            raise BadInput(f"recompute_method: {self.method!r} is unknown; use uniform or block")
        if self.granularity is Granularity.FULL and self.num_layers < 1:
            raise BadInput(f"recompute_num_layers: {self.num_layers} layers; use at least 1")

    def has(self, module: str) -> bool:
        """Return whether this module's activations are recomputed by the selective kind."""
        return self.granularity is Granularity.SELECTIVE and module in self.modules


@dataclass(frozen=True)
class ParallelLayout:
    """A parallel layout with the training options that decide about memory.

    mbs, gbs: sequences per micro-batch and per step. gbs None: one micro-batch per pipeline stage. seq_length None: the
    architecture's. etp None: as tp, Megatron-Core's default. sequence_parallel None: whenever tp > 1.
    pipeline_layout: explicit, such as "Et*4|(t*4|)*14tmL".
    fp8_param_gather: keep the weights in 8 bits only, of NVFP4 in 4. has_fp8_transposes: per-tensor and block scaling
    keep a transposed copy of every weight: Hopper's products need it, Blackwell's do not.
    use_megatron_fsdp: parameters, gradients and optimizer are sharded. adapters: the weights are frozen, and
    these are trained beside them. num_distributed_optimizer_instances: copies of what is sharded over the
    data-parallel ranks (HSDP). outer_dp_sharding_strategy: "no_shard", or "optim": Megatron-FSDP splits the optimizer's
    state over the copies, too.
    optimizer_offload_fraction: share of the optimizer state that lives in host memory. activation_offload_layers:
    layers per chunk whose activations do. offload_modules: of the fine-grained kind, "moe_act" (what the experts'
    activation functions read) is modelled.
    moe_imbalance: tokens of the fullest rank over the mean. fp32_logits: the loss keeps the logits in 32 bits.
    cuda_graph: "none", "attention" (attention and router of every layer) or "full". captures_router: whether a partial
    graph has the experts' router. dispatches_once: a token goes to a rank once, however many of its experts live there
    (DeepEP, HybridEP), and not once for each of them.
    """

    num_gpus: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int | None = None
    mbs: int = 1
    gbs: int | None = None
    seq_length: int | None = None
    sequence_parallel: bool | None = None
    pipeline_layout: str | None = None
    recompute: Recompute = field(default_factory=Recompute)
    precision: Precision = Precision.BF16
    implementation: Implementation = Implementation.FUSED
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    optimizer_bytes: int = MASTER_WEIGHTS
    fp8_param_gather: bool = False
    has_fp8_transposes: bool = True
    use_megatron_fsdp: bool = False
    optimizer_offload_fraction: float = 0.0
    activation_offload_layers: int = 0
    offload_modules: frozenset[str] = frozenset()
    moe_imbalance: float = 1.0
    fp32_logits: bool = True
    cuda_graph: str = "none"
    captures_router: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    dispatches_once: bool = False
    adapters: Adapters | None = None
    num_distributed_optimizer_instances: int = 1
    outer_dp_sharding_strategy: str = "no_shard"

    def __post_init__(self) -> None:
        """Raise BadInput for sizes that do not fit together; the rules explain in more detail."""
        for name in ("num_gpus", "tp", "pp", "cp", "vp", "ep", "mbs"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}: {getattr(self, name)} is not positive; use at least 1")
        for name, model in (("tp*pp*cp", self.tp * self.pp * self.cp), ("ep*et*pp", self.expert_ranks)):
            if self.num_gpus % model:
                raise BadInput(f"num_gpus: {self.num_gpus} is not divisible by {name} = {model}; use a multiple of it")
        if self.gbs is not None and self.gbs % (self.mbs * self.dp):
            sequences = self.mbs * self.dp
            raise BadInput(f"gb: {self.gbs} is not divisible by mb*dp = {sequences}; use a multiple of {sequences}")
        instances = self.num_distributed_optimizer_instances
        if instances < 1 or self.dp * self.cp % instances or self.expert_dp % instances:
            copies = f"dp*cp = {self.dp * self.cp}, expert dp = {self.expert_dp}"
            raise BadInput(f"num_distributed_optimizer_instances: {instances} does not divide {copies}; use a divisor")
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise BadInput(f"optimizer_offload_fraction: {self.optimizer_offload_fraction} is not between 0 and 1")
        if self.moe_imbalance < 1:
            raise BadInput(f"moe_imbalance: {self.moe_imbalance} is below the mean; use at least 1")

    def changed(self, **values: Any) -> "ParallelLayout":
        """Return the layout with other values; BadInput if the sizes do not fit together.

        `replace` goes through all fields: too slow for every point of a sweep.
        """
        other = object.__new__(ParallelLayout)
        other.__dict__.update(self.__dict__, **values)
        for name in ("dp", "expert_dp"):
            other.__dict__.pop(name, None)
        other.__post_init__()
        return other

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_ranks(self) -> int:
        """Ranks that together hold every expert of every stage once."""
        return self.ep * self.expert_tp * self.pp

    @cached_property
    def dp(self) -> int:
        """Data-parallel copies of the dense layers."""
        return self.num_gpus // (self.tp * self.pp * self.cp)

    @cached_property
    def expert_dp(self) -> int:
        """Data-parallel copies of an expert."""
        return self.num_gpus // self.expert_ranks

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per step and pipeline."""
        return self.pp if self.gbs is None else self.gbs // (self.mbs * self.dp)

    @property
    def has_sequence_parallel(self) -> bool:
        """Whether the token dimension is split over the tensor-parallel ranks outside of the matrix products."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1
