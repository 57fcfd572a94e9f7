"""Commands that start runs, watch them and show their results."""
