"""Trend of a series of runs: levels, changes, drifts."""
