"""The journal of a run: what was submitted, and how it ended."""
