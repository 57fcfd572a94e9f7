"""Export of results to external tools: a module per target, through the target's own library."""
