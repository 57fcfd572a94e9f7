"""Megatron-Bridge's own launcher: its command line, and the script around it."""
