"""Read the runs of report.json files, and check their digests."""
