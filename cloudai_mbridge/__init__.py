"""Describe, sweep, check, run and judge LLM-training benchmarks with Megatron-Core."""

__version__ = "0.1.0"
