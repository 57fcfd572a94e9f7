"""Baseline files: read, check, write, and promote runs into them."""
