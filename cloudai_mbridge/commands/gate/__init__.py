"""Commands that compare results: the gate, baselines, the history, the nodes."""
