"""Differences between Megatron-Core releases: one module per concern, selected by the installed features."""
