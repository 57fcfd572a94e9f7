"""What a series of runs did over time: levels, changes, drifts."""
