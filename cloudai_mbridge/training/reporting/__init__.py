"""Reports of a run: the lines of a step, the series of the loggers, memory, FLOPs and progress."""
