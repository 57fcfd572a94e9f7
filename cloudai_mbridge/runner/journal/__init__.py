"""The journal of a run: its submissions and their results."""
