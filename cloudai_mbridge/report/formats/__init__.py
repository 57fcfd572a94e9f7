"""Every output format of a report and of a gate's result."""
