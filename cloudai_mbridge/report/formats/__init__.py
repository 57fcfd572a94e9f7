"""Every output format of a report."""
