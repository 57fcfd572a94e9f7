"""Megatron-Bridge's name for where tokenizers are built."""

from cloudai_mbridge.training.tokenizers.build import build_tokenizer

__all__ = ["build_tokenizer"]
