"""The summary of a point that a sweep shows, and its memory limit."""

from dataclasses import dataclass

from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.models.system import System

START_UP_S = 300.0  # containers, imports, compilation: an allowance for budgets, not in gpu_hours


@dataclass(frozen=True)
class MemoryLimit:
    """Which share of a GPU's memory states and activations may need.

    is_asked_for: set by the user; then points of unknown memory exceed it. The default lets these pass, and points
    whose performance was published: these have run, and need no room for the estimate's error.
    """

    share: float
    is_asked_for: bool = True


DEFAULT_LIMIT = MemoryLimit(0.9, is_asked_for=False)


@dataclass(frozen=True, slots=True)
class Headline:
    """Estimates of a point; None if unknown, with the reasons in `why`. gpu_memory_gib: of the GPU.

    modelled_gib: weights, gradients, optimizer and activations of the stage that needs most of them; the rest of the
    peak is what a safety share leaves room for: context, communicators, workspace, fragmentation.
    is_known_to_fit: a published point that differs in GPUs and batch alone needs as much.
    is_shipped: a preset of the pinned release for this GPU needs as much: it fits, whatever is predicted.
    """

    gpu: str | None
    num_gpus: int
    peak_memory_gib: float | None = None
    modelled_gib: float | None = None
    gpu_memory_gib: float | None = None
    worst_stage: int | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    why: tuple[str, ...] = ()
    is_known_to_fit: bool = False
    is_shipped: bool = False

    @property
    def memory_share(self) -> float | None:
        """The share of the GPU's memory that states and activations need."""
        if self.modelled_gib is None or not self.gpu_memory_gib:
            return None
        return self.modelled_gib / self.gpu_memory_gib

    def exceeds(self, limit: MemoryLimit | None) -> bool:
        """Return whether states and activations exceed the share, or all terms exceed the GPU's memory."""
        if limit is None or (self.is_shipped and not limit.is_asked_for):
            return False
        if self.memory_share is None or not self.gpu_memory_gib:
            return limit.is_asked_for
        share = limit.share if limit.is_asked_for or not self.is_known_to_fit else max(limit.share, 1.0)
        return self.memory_share > share or (self.peak_memory_gib or 0.0) > max(share, 1.0) * self.gpu_memory_gib

    def gpu_hours(self, num_steps: int | None, start_up_s: float = 0.0) -> float | None:
        """Return the GPU-hours of a run, or None if step time or steps are unknown."""
        if self.step_time_s is None or num_steps is None:
            return None
        return self.num_gpus * (self.step_time_s * num_steps + start_up_s) / 3600


@dataclass(frozen=True)
class Price:
    """Of one GPU-hour."""

    per_gpu_hour: float
    currency: str


def price_of(system: System | None, gpu: str | None) -> tuple[Price | None, str]:
    """Return the price of the GPU of this name on a system, or None and the reason."""
    if not gpu:
        return None, "unknown GPU"
    if system is None or not system.prices.per_gpu_hour:
        return None, "the system has no [prices]"
    for name, price in system.prices.per_gpu_hour.items():
        if (found := find_gpu(name)) is not None and found.name == gpu:
            return Price(price, system.prices.currency), ""
    unknown = [repr(name) for name in system.prices.per_gpu_hour if find_gpu(name) is None]
    remark = f"; {', '.join(unknown)} is not a GPU with known figures" if unknown else ""
    return None, f"system {system.name!r}: [prices] has none for {gpu}{remark}"
