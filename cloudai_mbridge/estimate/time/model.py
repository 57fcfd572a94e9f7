"""The step time of a layout: ideal parts, corrected by the calibration, plus the waiting time of a stage."""

import math
from dataclasses import replace
from functools import cache, lru_cache
from operator import attrgetter

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, Precision
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time import parts as ideal
from cloudai_mbridge.estimate.time.calibration import (
    Calibration,
    HeldOutError,
    Setting,
    Switches,
    load_calibration,
    switches_of,
)
from cloudai_mbridge.estimate.time.parts import (
    GROUP_OF,
    GpuRates,
    IdealTimes,
    StepGroups,
    device_of,
    grouped,
    together_s,
)
from cloudai_mbridge.estimate.time.work import Work, work_of
from cloudai_mbridge.recipes import load_recipe, recipe_names

# The terms of a step's time, and the parts that each adds up. Communication terms are what is left after overlap, on
# average over the rows of the calibration: a coefficient below 1 there is the share that was not hidden. overhead:
# launches and synchronisation of experts, and where the GPU waits for the host. bubble: the stage waits for the others
_TERMS = {
    "matmul_attention": ("matmul_attention",),
    "matmul_mlp": ("matmul_mlp",),
    "matmul_experts": ("matmul_experts",),
    "matmul_output": ("matmul_output",),
    "matmul_memory": ("memory_matmul", "memory_experts", "memory_weights"),
    "attention_core": ("attention_core", "attention_exp", "sparse_core"),
    "state_space": ("scan",),
    "elementwise": ("elementwise", "activation", "routing"),
    "overhead": ("launches_moe", "launches_experts", "launches_network"),
    "tp_comm": ("tp_comm",),
    "cp_comm": ("cp_comm",),
    "ep_comm": ("ep_nvlink", "ep_network"),
    "pp_comm": ("pp_comm",),
    "bubble": (),
    "dp_comm": ("dp_comm", "fsdp_comm"),
    "optimizer": ("optimizer",),
}


class TimeModel:
    """Step times of one model on one GPU type in one precision, for any number of layouts."""

    def __init__(self, setting: Setting, device: GpuRates, calibration: Calibration) -> None:
        self._setting, self._device, self._calibration = setting, device, calibration
        self._coefficients: dict[Switches, tuple[float, ...]] = {}
        self._launch = calibration.coefficients["launches"].value
        if device.gpu.measured is not None:
            self._launch *= device.gpu.measured.step_time.launches
        self._coefficients_of(Switches())  # refuses an impossible container
        self._works: dict[tuple[int, int, int], Work] = {}
        self._other_lengths: dict[int, TimeModel] = {}

    def error(self, *, is_in_fit: bool = False, task: str = "pretrain") -> HeldOutError:
        """Return the error of such step times on published rows that were not in the fit.

        is_in_fit: the very configuration was published. task: of the training.
        """
        setting, why = self._setting, ""
        if setting.is_frozen:
            why = "one published row is of adapters (5 % off)"
        elif task != "pretrain":
            why = "no published row of fine-tuning can be predicted: the lengths of its packed sequences are not known"
        return self._calibration.error_of(
            setting.model.recipe,
            setting.gpu.name,
            setting.precision,
            setting.gpu.measured,
            is_changed=_is_changed(setting.model),
            is_in_fit=is_in_fit,
            why_unlike=why,
        )

    def step_time_s(self, layout: ParallelLayout) -> float:
        """Return the seconds of a step.

        BadInput: the step has no micro-batch, or sizes so large that the time overflows.
        """
        parts, waiting, idle = self._real_parts(layout)
        seconds = sum(parts) + waiting + idle
        if not 0 < seconds < math.inf:
            raise BadInput(f"a step of {seconds} s; use smaller sizes")
        return seconds

    def step_time(self, layout: ParallelLayout) -> dict[str, float]:
        """Return the same on the slowest pipeline stage in its terms, which add up."""
        self.step_time_s(layout)
        parts, waiting, idle = self._real_parts(layout)
        named, extra = IdealTimes(*parts)._asdict(), {"overhead": waiting, "bubble": idle}
        return {name: sum(map(named.__getitem__, own), extra.get(name, 0.0)) for name, own in _TERMS.items()}

    def groups(self, layout: ParallelLayout) -> StepGroups:
        """Return the parts in groups; BadInput as for `step_time_s`."""
        self.step_time_s(layout)
        parts, _, _ = self._real_parts(layout)
        microbatches = layout.num_microbatches
        return grouped(parts, self._launches_s(layout), ideal.bubble(layout.pp, layout.vp, microbatches))

    def _real_parts(self, layout: ParallelLayout) -> tuple[list[float], float, float]:
        """Return the parts, the GPU's waiting time for the host's launches, and the pipeline's idle time."""
        model = self._setting.model
        if layout.seq_length is not None and layout.seq_length != model.seq_length:
            if layout.seq_length not in self._other_lengths:
                setting = self._setting._replace(model=replace(model, seq_length=layout.seq_length))
                self._other_lengths[layout.seq_length] = TimeModel(setting, self._device, self._calibration)
            return self._other_lengths[layout.seq_length]._real_parts(layout)
        microbatches, work = layout.num_microbatches, self._work(layout)
        if microbatches < 1:
            raise BadInput(f"gb: {layout.gbs} makes no step; use at least mb*dp = {layout.mbs * layout.dp}")
        at_best = ideal.ideal_parts(model, work, layout, self._device, microbatches)
        factors = self._coefficients_of(switches_of(layout))
        real = [seconds * factor for seconds, factor in zip(at_best, factors, strict=True)]
        busy = sum(real[: ideal.NUM_PIPELINED])
        waiting = together_s(busy, self._launches_s(layout)) - busy
        return real, waiting, (busy + waiting) * ideal.bubble(layout.pp, layout.vp, microbatches)

    def _coefficients_of(self, switches: Switches) -> tuple[float, ...]:
        found = self._coefficients.get(switches)
        if found is None:
            found, measured = self._calibration.part_coefficients(self._setting, switches), self._device.gpu.measured
            if measured is not None:
                each = zip(IdealTimes._fields, found, strict=True)
                found = tuple(value * getattr(measured.step_time, GROUP_OF[name]) for name, value in each)
            self._coefficients[switches] = found
        return found

    def _launches_s(self, layout: ParallelLayout) -> float:
        return self._launch * ideal.launch_time_s(self._work(layout), layout, layout.num_microbatches)

    def _work(self, layout: ParallelLayout) -> Work:
        key = (layout.tp, layout.ep, layout.expert_tp)
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = work_of(self._setting.model, *key)
        return work


_SIZES = attrgetter(
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"),
)


@cache
def _is_changed(model: Architecture) -> bool:
    """Return whether a model has other sizes than its recipe's, or the recipe is not known."""
    return model.recipe not in recipe_names() or _SIZES(model) != _SIZES(architecture(load_recipe(model.recipe)))


def why_no_time(gpu: Gpu, precision: Precision) -> str | None:
    """Return why a GPU and a precision have no step time, or None if they have one."""
    if not gpu.is_known:
        return f"unknown peak of {gpu.name}"
    if device_of(gpu, precision) is None:
        return f"{gpu.name} has no {precision} tensor cores"
    return None


@lru_cache(maxsize=256)
def time_model(
    model: Architecture, gpu: Gpu, precision: Precision, container: str | None = None, is_frozen: bool = False
) -> TimeModel:
    """Return the model of step times.

    container: None is the newest software of the calibration.
    is_frozen: only adapters are trained (LoRA); their own work is not counted.
    BadInput: unavailable for this GPU and precision, or `container` is not a version.
    """
    device = device_of(gpu, precision)
    if device is None:
        raise BadInput(f"no step time: {why_no_time(gpu, precision)}")
    return TimeModel(Setting(model, gpu, precision, container, is_frozen), device, load_calibration())
