"""Everything before the first step: configuration, process groups, and the record of hardware and software."""
