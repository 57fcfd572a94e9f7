"""Megatron-Bridge's own launcher: what it is told, and the script around it."""
