"""The estimate of one point: FLOPs, parameters, memory, time, cost. docs/estimate.md.

An unknown value is None, with the reason in `missing`. For many points of a sweep use `estimate.headlines`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Gpu, gpu_named, mfu
from cloudai_mbridge.estimate.headline import Price
from cloudai_mbridge.estimate.memory import ParallelLayout, StageMemory, memory_per_stage, worst_stage
from cloudai_mbridge.estimate.memory.adapter_parameters import active_adapters
from cloudai_mbridge.estimate.memory.adapters import Adapters
from cloudai_mbridge.estimate.memory.other import GIB, NOTHING, Assumptions
from cloudai_mbridge.estimate.memory.parameters import active_parameters, total_parameters
from cloudai_mbridge.estimate.memory.reference import REFERENCES
from cloudai_mbridge.estimate.overrides import not_considered
from cloudai_mbridge.estimate.precision import precision_named
from cloudai_mbridge.estimate.published import PublishedRow
from cloudai_mbridge.estimate.request import EstimateRequest, answer_or_why, refusing
from cloudai_mbridge.estimate.time.calibration import HeldOutError
from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.estimate.time.model import StepTime, TimeModel, time_model, why_no_time
from cloudai_mbridge.training.flops import Formula, flops_per_token
from cloudai_mbridge.training.reporting.theoretical_memory import TheoreticalMemory

DEFAULT_ESTIMATOR = "default"
ESTIMATORS = (DEFAULT_ESTIMATOR, *REFERENCES)
STAND_IN = "h100"  # for an unknown device
T = TypeVar("T")


@dataclass(frozen=True)
class ParameterCounts:
    """Of the whole model; active: parameters used per token."""

    total: int
    active: int


@dataclass(frozen=True)
class Speed:
    """Rates that follow from a step time. None if unknown."""

    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None


@dataclass(frozen=True)
class PointEstimate(Speed):
    """The answer. Times in seconds, memory in bytes or GiB as named; `missing`: field -> why it is None.

    stages: memory of every pipeline stage, in the terms of the default estimator; None with a reference estimator,
    whose `reference` has its own two terms. peak_memory_gib: of the fullest stage. memory_share: of the GPU's
    memory, needed for states and activations.
    gpu_hours: of the steps alone, without start-up. cost: of these. published: rows of exactly this point.
    not_considered: settings that no estimate reads. filled_in: as in `EstimateRequest`.
    """

    recipe: str
    gpu: str | None
    layout: ParallelLayout
    formula: Formula
    flops_per_token: int
    tokens_per_step: int
    num_steps: int | None
    parameters: ParameterCounts | None
    estimator: str
    stages: tuple[StageMemory, ...] | None
    reference: TheoreticalMemory | None
    peak_memory_gib: float | None
    gpu_memory_gib: float | None
    memory_share: float | None
    step_time: StepTime | None
    held_out_error: HeldOutError | None
    gpu_hours: float | None
    cost: float | None
    currency: str | None
    published: tuple[PublishedRow, ...] = ()
    not_considered: tuple[str, ...] = ()
    filled_in: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest stage fits into the GPU; None if unknown. Published points did fit."""
        if self.published:
            return True
        if self.peak_memory_gib is None or self.gpu_memory_gib is None:
            return None
        return self.peak_memory_gib <= self.gpu_memory_gib

    @property
    def worst_stage(self) -> StageMemory | None:
        """The stage that needs most memory."""
        return worst_stage(self.stages) if self.stages else None


def estimate_point(
    request: EstimateRequest,
    *,
    estimator: str = DEFAULT_ESTIMATOR,
    price: Price | None = None,
    why_no_price: str = "no price",
) -> PointEstimate:
    """Estimate a point.

    BadInput: sizes that do not fit together, an unknown number format or estimator, or a model that the FLOPs formula
    refuses.
    """
    model, missing = request.architecture, dict[str, str]()
    layout = request.layout_of(model)
    flops, gpu = flops_of(model, request.formula, layout.adapters), request.gpu
    tokens = tokens_per_step(model, layout)
    parameters = _or_why(
        missing, "parameters", lambda: ParameterCounts(total_parameters(model), active_parameters(model))
    )
    stages, reference = _memory(missing, model, layout, gpu, estimator)
    peak = reference.total if reference else worst_stage(stages).total if stages else None
    # of states and activations; a reference estimator models nothing else
    most = max((stage.states + stage.activations for stage in stages or ()), default=peak)
    times = _or_why(missing, "step_time_s", lambda: times_of(request, model))
    step = _or_why(missing, "step_time_s", lambda: times.step_time(layout)) if times else None
    seconds = step.step_time_s if step else None
    speed = speed_of(seconds, tokens, flops, request, layout.num_gpus, missing)
    num_steps = request.args.max_steps
    gpu_hours = _gpu_hours(seconds, layout, num_steps, missing)
    cost = price.per_gpu_hour * gpu_hours if price and gpu_hours is not None else None
    if cost is None:
        missing["cost"] = missing.get("gpu_hours", why_no_price)
    memory_gib = gpu.memory_gib if gpu else None
    if memory_gib is None or peak is None:
        why = f"the memory of {gpu.name} is not known" if gpu else request.why_no_gpu
        missing["memory_share"] = missing.get("memory") or why
    return PointEstimate(
        recipe=request.recipe.name,
        gpu=gpu.name if gpu else None,
        layout=layout,
        formula=request.formula,
        flops_per_token=flops,
        tokens_per_step=tokens,
        num_steps=num_steps,
        parameters=parameters,
        estimator=estimator,
        stages=stages,
        reference=reference,
        peak_memory_gib=None if peak is None else peak / GIB,
        gpu_memory_gib=memory_gib,
        memory_share=most / GIB / memory_gib if most is not None and memory_gib else None,
        step_time=step,
        held_out_error=times.held_out_error if times else None,
        **vars(speed),
        gpu_hours=gpu_hours,
        cost=cost,
        currency=price.currency if price else None,
        published=request.published(model),
        not_considered=not_considered(request.args, request.extra),
        filled_in=request.filled_in,
        missing=MappingProxyType(missing),
    )


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


def guess_of(request: EstimateRequest) -> EstimateRequest | None:
    """Return the request for a stand-in GPU if the point's device is unknown, else None.

    Step times are then off by an arbitrary factor; the order of layouts is often the same.
    """
    if request.gpu is not None and request.gpu.is_known:
        return None
    return replace(request, gpu=gpu_named(STAND_IN))


def assumptions_for(gpu: Gpu | None) -> Assumptions:
    """Return the assumptions about other memory on the device, with its measured factor; NOTHING for a processor."""
    if gpu is not None and not gpu.is_known:
        return NOTHING
    return Assumptions() if gpu is None or gpu.measured is None else Assumptions(measured=gpu.measured.memory)


def speed_of(
    step_time_s: float | None,
    tokens: int,
    flops: int,
    request: EstimateRequest,
    num_gpus: int,
    missing: dict[str, str] | None = None,
) -> Speed:
    """Return the rates of a step time. tokens: of a step. flops: of a token."""
    missing = {} if missing is None else missing
    if step_time_s is None or request.gpu is None:
        why = missing.get("step_time_s", request.why_no_gpu)
        missing |= dict.fromkeys(("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"), why)
        return Speed(None, None, None, None)
    rate = tokens / step_time_s / num_gpus
    tflops = rate * flops / 1e12
    precision = precision_named(request.args.compute_dtype)
    share = mfu(tflops, request.gpu, precision)
    if share is None:
        missing["mfu"] = f"{request.gpu.name} has no peak for {precision}"
    return Speed(step_time_s, rate, tflops, share)


def _memory(
    missing: dict[str, str], model: Architecture, layout: ParallelLayout, gpu: Gpu | None, estimator: str
) -> tuple[tuple[StageMemory, ...] | None, TheoreticalMemory | None]:
    if estimator == DEFAULT_ESTIMATOR:
        stages = _or_why(missing, "memory", lambda: memory_per_stage(model, layout, assumptions_for(gpu)))
        return stages, None
    if estimator not in REFERENCES:
        raise BadInput(f"memory estimator: {estimator!r} is unknown; use one of {', '.join(ESTIMATORS)}")
    return None, _or_why(missing, "memory", lambda: REFERENCES[estimator](model, layout))


def _gpu_hours(
    step_time_s: float | None, layout: ParallelLayout, num_steps: int | None, missing: dict[str, str]
) -> float | None:
    if step_time_s is None or num_steps is None:
        missing["gpu_hours"] = missing.get("step_time_s", "the number of steps is not known")
        return None
    return layout.num_gpus * step_time_s * num_steps / 3600


def _or_why(missing: dict[str, str], name: str, answer: Callable[[], T]) -> T | None:
    return answer_or_why(name, answer, partial(missing.__setitem__, name))
