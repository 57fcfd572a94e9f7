"""Facts about releases of Megatron-Bridge: a test's pinned release, its presets, its launcher's options."""

from cloudai_mbridge.megatron_bridge.release import Release, find_release

__all__ = ["Release", "find_release"]
