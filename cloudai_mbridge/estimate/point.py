"""The estimate of one point: FLOPs, parameters, memory, time, cost. docs/estimate.md.

An unknown value is None, with the reason in `missing`. For many points of a sweep use `estimate.headline`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Gpu, Price, gpu_named, mfu, precision_named
from cloudai_mbridge.estimate.memory.adapter_parameters import active_adapters
from cloudai_mbridge.estimate.memory.estimate import (
    GIB,
    NOTHING,
    REFERENCES,
    Assumptions,
    StageMemory,
    memory_per_stage,
    worst_stage,
)
from cloudai_mbridge.estimate.memory.layout import Adapters, ParallelLayout, Recompute
from cloudai_mbridge.estimate.memory.parameters import active_parameters, total_parameters
from cloudai_mbridge.estimate.published import PublishedRow
from cloudai_mbridge.estimate.request import EstimateRequest, answer_or_why, not_considered, refusing
from cloudai_mbridge.estimate.time.model import TimeModel, time_model, why_no_time
from cloudai_mbridge.estimate.time.parts import StepGroups
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.training.flops import Formula, flops_per_token

DEFAULT_ESTIMATOR = "default"
ESTIMATORS = (DEFAULT_ESTIMATOR, *REFERENCES)
STAND_IN = "h100"  # for an unknown device
T = TypeVar("T")


@dataclass(frozen=True)
class Parameters:
    """Of the whole model; active: parameters used per token."""

    total: int
    active: int


_LAYOUT = json_object(
    "Layout",
    "The parallel layout with the training options that decide about memory.",
    num_gpus=int,
    tp=int,
    pp=int,
    cp=int,
    vp=int,
    ep=int,
    expert_tp=int,
    dp=int,
    expert_dp=int,
    mbs=int,
    gbs=int | None,
    num_microbatches=int,
    seq_length=int | None,
    pipeline_layout=str | None,
    sequence_parallel=bool,
    recompute=Recompute,
    use_megatron_fsdp=bool,
    use_distributed_optimizer=bool,
    activation_offload_layers=int,
    cuda_graph=str,
    implementation=str,
)


def _as_layout(layout: ParallelLayout) -> dict[str, Any]:
    return fill(_LAYOUT, layout, sequence_parallel=layout.has_sequence_parallel)


@dataclass(frozen=True)
class Memory:
    """Of the GPU. share: of its memory, for states and activations. stages: none of a reference estimator.

    terms, line: of a reference estimator alone.
    bound: "at most", "at least" or "about", if settings that change memory have no model; why_bound names them.
    """

    estimator: str
    peak_memory_gib: float
    gpu_memory_gib: float | None
    share: float | None
    worst_stage: int | None = None
    stages: tuple[StageMemory, ...] = ()
    terms: Mapping[str, float] | None = None
    line: str | None = None
    bound: str = ""
    why_bound: str = ""


_PUBLISHED = json_object(
    "Published",
    "A row of Megatron-Bridge's tables that is of this point.",
    container=str,
    label=str,
    step_time_s=float,
    tokens_per_s_per_gpu=float,
    tflops_per_gpu=float,
    flops_formula=str,
)


def _as_published(row: PublishedRow) -> dict[str, Any]:
    return fill(_PUBLISHED, row, flops_formula=row.formula)


@dataclass(frozen=True)
class Estimate:
    """One point. Times in seconds; None if unknown, with the reason in `missing`. filled_in: by which preset.

    not_filled_in: why by none. fits: whether the fullest stage fits into the GPU; None if settings without a model may
    make it fit. step_time_terms_s: they add up. step_time_median_error: relative; None if no point like this one was
    measured. step_time_90_s: bounds of nine of ten such step times. gpu_hours: of the steps alone. published: of
    exactly this point. not_considered: set, and read by no estimate.
    """

    recipe: str
    gpu: str | None
    precision: str
    layout: Annotated[ParallelLayout, PlainSerializer(_as_layout, return_type=_LAYOUT)]
    flops_formula: str
    flops_per_token: int
    parameters: Parameters | None
    memory: Memory | None
    fits: bool | None
    tokens_per_step: int
    step_time_s: float | None
    step_time_terms_s: Mapping[str, float] | None
    step_time_median_error: float | None
    step_time_error: str | None
    step_time_90_s: tuple[float, float] | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    num_steps: int | None
    gpu_hours: float | None
    cost: float | None
    currency: str | None
    published: tuple[Annotated[PublishedRow, PlainSerializer(_as_published, return_type=_PUBLISHED)], ...]
    not_considered: tuple[str, ...]
    filled_in: str
    not_filled_in: str
    missing: Mapping[str, str]


def estimate_point(
    request: EstimateRequest,
    *,
    estimator: str = DEFAULT_ESTIMATOR,
    price: Price | None = None,
    why_no_price: str = "no price",
) -> Estimate:
    """Estimate a point.

    BadInput: sizes that do not fit together, an unknown number format or estimator, or a model that the FLOPs formula
    refuses.
    """
    model, missing = request.architecture, dict[str, str]()
    layout, gpu = request.layout_of(model), request.gpu
    flops, tokens = flops_of(model, request.formula, layout.adapters), tokens_per_step(model, layout)
    parameters = _or_why(missing, "parameters", lambda: Parameters(total_parameters(model), active_parameters(model)))
    if estimator not in ESTIMATORS:
        raise BadInput(f"memory estimator: {estimator!r} is unknown; use one of {', '.join(ESTIMATORS)}")
    memory = _or_why(missing, "memory", lambda: _memory(model, layout, request, estimator))
    times = _or_why(missing, "step_time_s", lambda: times_of(request, model))
    terms = _or_why(missing, "step_time_s", lambda: times.step_time(layout)) if times else None
    seconds, num_steps, gpu_hours = sum(terms.values()) if terms else None, request.args.max_steps, None
    speed = speed_of(seconds, tokens, flops, request, layout.num_gpus, missing)
    if seconds is None or num_steps is None:
        missing["gpu_hours"] = missing.get("step_time_s", "the number of steps is not known")
    else:
        gpu_hours = layout.num_gpus * seconds * num_steps / 3600
    cost = price.per_gpu_hour * gpu_hours if price and gpu_hours is not None else None
    if cost is None:
        missing["cost"] = missing.get("gpu_hours", why_no_price)
    if memory is None or memory.gpu_memory_gib is None:
        why = f"the memory of {gpu.name} is not known" if gpu else request.why_no_gpu
        missing["memory_share"] = missing.get("memory") or why
    published = request.published(model)
    error = times.error(is_in_fit=bool(published), task=request.args.task) if times else None
    unmodelled, fits = request.without_model(layout), None
    if memory is not None:
        memory = replace(memory, bound=unmodelled.bound, why_bound=str(unmodelled))
    if published:  # it did fit
        fits = True
    elif memory is not None and memory.gpu_memory_gib is not None:
        fits = memory.peak_memory_gib <= memory.gpu_memory_gib
        if not fits and unmodelled.may_need_less:
            fits = None
            missing["fits"] = str(unmodelled)
    return Estimate(
        recipe=request.recipe.name,
        gpu=gpu.name if gpu else None,
        precision=str(layout.precision),
        layout=layout,
        flops_formula=str(request.formula),
        flops_per_token=flops,
        parameters=parameters,
        memory=memory,
        fits=fits,
        tokens_per_step=tokens,
        step_time_terms_s=terms,
        step_time_median_error=error.median if error and error.is_known else None,
        step_time_error=str(error) if error else None,
        step_time_90_s=error.interval_s(seconds) if error and seconds else None,
        **speed,
        num_steps=num_steps,
        gpu_hours=gpu_hours,
        cost=cost,
        currency=price.currency if price else None,
        published=published,
        not_considered=not_considered(request.args, request.extra),
        filled_in=request.filled_in,
        not_filled_in=request.why_not_filled_in,
        missing=missing,
    )


@lru_cache(maxsize=4096)
def flops_of(model: Architecture, formula: Formula, adapters: Adapters | None = None) -> int:
    """Return the FLOPs per token; BadInput if the formula refuses the model. adapters: trained with frozen weights."""
    with refusing(f"recipe {model.recipe}: no FLOPs by {formula}"):
        if adapters is None:
            return flops_per_token(model, formula)
        trained = 0
        with suppress(BadInput):  # layers whose memory is not modelled either: about a hundredth is missing
            trained = active_adapters(model, adapters)
        return flops_per_token(model, formula, frozen=True, adapter_weights=trained)


def tokens_per_step(model: Architecture, layout: ParallelLayout) -> int:
    """Return the tokens of a step on all GPUs."""
    sequences = layout.gbs or layout.num_microbatches * layout.mbs * layout.dp
    return sequences * (layout.seq_length or model.seq_length)


def times_of(request: EstimateRequest, model: Architecture) -> TimeModel:
    """Return the model of step times; BadInput with the reason if this GPU and number format have none."""
    if request.gpu is None:
        raise BadInput(request.why_no_gpu)
    precision = precision_named(request.args.compute_dtype)
    if reason := why_no_time(request.gpu, precision):
        raise BadInput(reason)
    return time_model(model, request.gpu, precision, is_frozen=request.trains_adapters)


def groups_of(request: EstimateRequest) -> StepGroups:
    """Return the parts of a point's step in groups; BadInput with the reason if the step time is unavailable."""
    with refusing("the layout cannot be estimated"):
        model = request.architecture
        return times_of(request, model).groups(request.layout_of(model))


def has_known_error(request: EstimateRequest) -> bool:
    """Return whether step times were measured on the point's GPU in its number format, so that their error is known."""
    try:
        return times_of(request, request.architecture).error().is_of_device
    except BadInput:
        return False


def guess_of(request: EstimateRequest) -> EstimateRequest | None:
    """Return the request for a stand-in GPU if the point's device is unknown, else None.

    Step times are then off by an arbitrary factor; the order of layouts is often the same.
    """
    if request.gpu is not None and request.gpu.is_known:
        return None
    return replace(request, gpu=gpu_named(STAND_IN))


def assumptions_for(gpu: Gpu | None, *, expands_segments: bool = False) -> Assumptions:
    """Return the assumptions about other memory on the device, with its measured factor; NOTHING for a processor."""
    if gpu is not None and not gpu.is_known:
        return NOTHING
    found = _EXPANDING if expands_segments else Assumptions()
    return found if gpu is None or gpu.measured is None else replace(found, measured=gpu.measured.memory)


_EXPANDING = Assumptions(fragmentation=0.0)


def speed_of(
    step_time_s: float | None,
    tokens: int,
    flops: int,
    request: EstimateRequest,
    num_gpus: int,
    missing: dict[str, str] | None = None,
) -> dict[str, float | None]:
    """Return the step time and its rates, by the names of `Estimate`. tokens: of a step. flops: of a token."""
    missing = {} if missing is None else missing
    rates = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    if step_time_s is None or request.gpu is None:
        missing |= dict.fromkeys(rates, missing.get("step_time_s", request.why_no_gpu))
        return dict.fromkeys(("step_time_s", *rates))
    rate = tokens / step_time_s / num_gpus
    tflops = rate * flops / 1e12
    precision = precision_named(request.args.compute_dtype)
    share = mfu(tflops, request.gpu, precision)
    if share is None:
        missing["mfu"] = f"{request.gpu.name} has no peak for {precision}"
    return {"step_time_s": step_time_s, "tokens_per_s_per_gpu": rate, "tflops_per_gpu": tflops, "mfu": share}


def _memory(model: Architecture, layout: ParallelLayout, request: EstimateRequest, estimator: str) -> Memory:
    limit = request.gpu.memory_gib if request.gpu else None
    if estimator != DEFAULT_ESTIMATOR:
        found = REFERENCES[estimator](model, layout)
        terms = {"weight_and_optimizer": found.weight_and_optimizer, "activation": found.activation}
        peak = found.total / GIB
        return Memory(estimator, peak, limit, peak / limit if limit else None, terms=terms, line=found.line())
    assumptions = assumptions_for(request.gpu, expands_segments=request.expands_segments)
    stages = memory_per_stage(model, layout, assumptions)
    worst, most = worst_stage(stages), max(stage.states + stage.activations for stage in stages)
    return Memory(estimator, worst.total_gib, limit, most / GIB / limit if limit else None, worst.stage, stages)


def _or_why(missing: dict[str, str], name: str, answer: Callable[[], T]) -> T | None:
    return answer_or_why(name, answer, partial(missing.__setitem__, name))
