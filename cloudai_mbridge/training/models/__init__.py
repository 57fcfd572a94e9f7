"""Megatron-Core GPT models: layer specs, construction, layout-invariant initialisation."""
