"""Helpers of the loop: FLOPs, log lines."""
