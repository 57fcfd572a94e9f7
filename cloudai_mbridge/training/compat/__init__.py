"""Where releases of Megatron-Core differ: one module per concern, chosen by what the installed one has."""
