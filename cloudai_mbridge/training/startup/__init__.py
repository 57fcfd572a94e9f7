"""Everything before the first step: configuration, process groups, and the record of what the run runs on."""
