"""What a GPU-hour costs, from the system's `[prices]`."""

from dataclasses import dataclass

from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.models.system import System


@dataclass(frozen=True)
class Price:
    """Of one GPU-hour."""

    per_gpu_hour: float
    currency: str


def price_of(system: System | None, gpu: str | None) -> tuple[Price | None, str]:
    """Return the price of the GPU of this name on a system, or None and why there is none."""
    if not gpu:
        return None, "the GPU is not known"
    if system is None or not system.prices.per_gpu_hour:
        return None, "the system has no [prices]"
    for name, price in system.prices.per_gpu_hour.items():
        if (found := find_gpu(name)) is not None and found.name == gpu:
            return Price(price, system.prices.currency), ""
    unknown = [repr(name) for name in system.prices.per_gpu_hour if find_gpu(name) is None]
    remark = f"; {', '.join(unknown)} is not a GPU with known figures" if unknown else ""
    return None, f"system {system.name!r}: [prices] has none for {gpu}{remark}"
