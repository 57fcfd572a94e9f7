"""Facts about releases of Megatron-Bridge: a test's pinned release, its presets, its launcher's options."""
