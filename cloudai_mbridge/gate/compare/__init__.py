"""Compare the runs of a result with a reference under a policy: statistics, verdicts, messages."""
