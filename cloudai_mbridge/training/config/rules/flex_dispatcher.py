"""Which GPUs the two backends of the flexible MoE token dispatcher, DeepEP and HybridEP, run on (Megatron-Bridge)."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

_DEEPEP_NAMES = ("NVIDIA B200", "NVIDIA B300")


class DeviceInfo(NamedTuple):
    """A GPU's name and compute capability."""

    name: str
    major: int
    minor: int


def current_device_info() -> DeviceInfo | None:
    """Return what GPU 0 is, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return DeviceInfo(device.name, device.major, device.minor)


def check_flex_dispatcher(config: "ConfigContainer") -> None:
    """Check the model's dispatcher against this machine's GPU."""
    validate_flex_dispatcher_backend(config.model, current_device_info())


def validate_flex_dispatcher_backend(model: Any, device: DeviceInfo | None) -> None:
    """Check that `device` runs the backend of the `flex` token dispatcher.

    `device` None (no GPU here) skips the check: a configuration may be checked where it will not run.

    Raises:
        ValueError: the GPU is not one that the backend supports.
    """
    if device is None or getattr(model, "moe_token_dispatcher_type", None) != "flex":
        return
    backend = getattr(model, "moe_flex_dispatcher_backend", None)
    if backend == "deepep" and not (device.major in (8, 9) or device.name.startswith(_DEEPEP_NAMES)):
        raise ValueError(_refusal(backend, "Ampere, Hopper, B200 and B300", device))
    if backend == "hybridep" and device.major not in (8, 9, 10):
        raise ValueError(_refusal(backend, "Ampere, Hopper and Blackwell (compute capability 10)", device))


def _refusal(backend: str, supported: str, device: DeviceInfo) -> str:
    return (
        f"model.moe_flex_dispatcher_backend={backend!r} runs on {supported} GPUs; this one is {device.name} "
        f"(compute capability {device.major}.{device.minor})"
    )
