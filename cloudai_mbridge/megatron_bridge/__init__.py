"""Facts about releases of Megatron-Bridge: which one a test pins, its presets, its launcher's options."""

from cloudai_mbridge.megatron_bridge.release import Release, find_release

__all__ = ["Release", "find_release"]
