"""Tokenizers of the training loop."""
