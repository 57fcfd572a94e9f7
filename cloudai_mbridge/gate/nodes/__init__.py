"""Nodes: which of them make runs slower, told from many runs in different company."""
