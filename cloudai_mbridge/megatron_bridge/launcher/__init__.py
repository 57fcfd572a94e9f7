"""Megatron-Bridge's own launcher: what it is passed, and the script around it."""
