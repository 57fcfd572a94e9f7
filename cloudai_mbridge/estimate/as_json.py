"""An estimate as plain data: the output of `mbridge estimate --json`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cloudai_mbridge.estimate.point import PointEstimate

Text = Annotated[str, BeforeValidator(str)]


class _Data(BaseModel):
    """Data whose values are attributes of these names."""

    model_config = ConfigDict(from_attributes=True)


class Parameters(_Data):
    """Of the whole model; active: parameters used per token."""

    total: int
    active: int


class RecomputeData(_Data):
    """Activation recomputation, in Megatron-Core's words."""

    granularity: Text
    modules: Annotated[list[str], BeforeValidator(sorted)]
    method: str
    num_layers: int


class Layout(_Data):
    """The parallel layout with the training options that decide about memory."""

    num_gpus: int
    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    expert_tp: int
    dp: int
    expert_dp: int
    mbs: int
    gbs: int | None
    num_microbatches: int
    seq_length: int | None
    pipeline_layout: str | None
    sequence_parallel: bool = Field(validation_alias="has_sequence_parallel")
    recompute: RecomputeData
    use_megatron_fsdp: bool
    use_distributed_optimizer: bool
    activation_offload_layers: int
    cuda_graph: str
    implementation: Text


class Stage(_Data):
    """A rank of one pipeline stage. total, terms: bytes."""

    stage: int
    parameters: int
    total: float
    total_gib: float
    terms: Mapping[str, float]


class Memory(_Data):
    """Of the GPU. share: of its memory, for states and activations. stages: none of a reference estimator.

    terms, line: of a reference estimator alone.
    """

    estimator: str
    peak_memory_gib: float
    gpu_memory_gib: float | None
    share: float | None
    worst_stage: int | None = None
    stages: list[Stage] = []
    terms: Mapping[str, float] | None = None
    line: str | None = None


class Published(_Data):
    """A row of Megatron-Bridge's tables that is of this point."""

    container: str
    label: str
    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    flops_formula: Text = Field(validation_alias="formula")


class Estimate(_Data):
    """One point. Times in seconds; None if unknown, with the reason in `missing`. filled_in: by which preset.

    fits: whether the fullest stage fits into the GPU. step_time_terms_s: they add up. step_time_median_error: relative.
    gpu_hours: of the steps alone. published: of exactly this point. not_considered: set, and read by no estimate.
    """

    recipe: str
    gpu: str | None
    precision: Text
    layout: Layout
    flops_formula: Text
    flops_per_token: int
    parameters: Parameters | None
    memory: Memory | None
    fits: bool | None
    tokens_per_step: int
    step_time_s: float | None
    step_time_terms_s: Mapping[str, float] | None
    step_time_median_error: float | None
    step_time_error: str | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    num_steps: int | None
    gpu_hours: float | None
    cost: float | None
    currency: str | None
    published: list[Published]
    not_considered: list[str]
    filled_in: str
    missing: Mapping[str, str]


def as_data(found: PointEstimate) -> Estimate:
    """Return the estimate as JSON data; memory terms in bytes, values named `*_gib` in GiB."""
    error = found.held_out_error
    return Estimate.model_validate(
        {
            **vars(found),
            "precision": found.layout.precision,
            "flops_formula": found.formula,
            "memory": _memory(found),
            "fits": found.fits,
            "step_time_terms_s": found.step_time.terms if found.step_time else None,
            "step_time_median_error": error.median if error and error.is_known else None,
            "step_time_error": str(error) if error else None,
        }
    )


def _memory(found: PointEstimate) -> Mapping[str, Any] | None:
    if found.peak_memory_gib is None:
        return None
    head = {**vars(found), "share": found.memory_share}
    if found.reference is not None:
        terms = {"weight_and_optimizer": found.reference.weight_and_optimizer, "activation": found.reference.activation}
        return {**head, "stages": (), "terms": terms, "line": found.reference.line()}
    return {**head, "stages": found.stages or (), "worst_stage": found.worst_stage.stage if found.worst_stage else None}
