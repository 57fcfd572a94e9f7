"""Read the runs of report.json files, and check that they can be true."""
